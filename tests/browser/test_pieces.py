"""The page shows how a network that is no language model is cut, over real nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from nesa_node.core.ids import Span
from tests.api.live import live_gateway
from tests.browser.axe import violations
from tests.browser.browsing import browsing, shoot
from tests.e2e.test_networks import save
from tests.swarms import in_process_swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_page_shows_pieces_their_work_and_their_nodes(tmp_path: Path) -> None:
    save("ViTForImageClassification", tmp_path / "model")
    spans = [Span(0, 2), Span(2, 4), Span(1, 4)]
    options = {"pieces": 5, "image_size": 32}
    with (
        in_process_swarm(tmp_path / "model", spans, tmp_path, **options) as addresses,
        live_gateway(addresses, tmp_path, networks=(str(tmp_path / "model"),)) as url,
        browsing(url) as page,
    ):
        rows = page.locator("#pieces tr")
        expect(rows).to_have_count(5)
        for row, nodes in enumerate(["1", "2", "2", "2", "none"]):
            expect(rows.nth(row).locator("td").last).to_have_text(nodes)
            expect(rows.nth(row)).to_contain_text("FLOP")
        expect(rows.last).to_have_class("lost")
        expect(page.locator("#plan-words")).to_contain_text("images of 32 pixels")
        assert not violations(page)
        shoot(page, "pieces")
