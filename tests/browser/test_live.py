"""Real daemons, a real gateway and its page in Chromium."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from nesa_node.cli.services.local_swarm import start_node, wait_until_serving
from nesa_node.core.ids import Span
from tests.api.live import live_gateway
from tests.browser.axe import violations
from tests.browser.browsing import PHONE, browsing, chromium, shoot
from tests.cli.tiny import write_tiny_model
from tests.swarms import READY_S, Daemons

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOSTILE = "<img src=x onerror=alert(1)>"
TTL_S = 9
SPANS = (Span(0, 2), Span(2, 3), Span(3, 4))
LINKS_MS = 40_000
FAILING_MS = 5_000
SLACK_S = 2.0
"""For the page to hear of it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()
    return write_tiny_model(tmp_path_factory.mktemp("page") / "tiny")


@pytest.fixture
def daemons(model: Path, tmp_path: Path) -> Iterator[Daemons]:
    flags = ("--record-ttl-s", str(TTL_S), "--ping-every-s", "1")
    with ExitStack() as stack:
        daemons = Daemons(stack, model, tmp_path, flags)
        daemons.start_all(SPANS)
        yield daemons


def test_page_of_a_gateway_shows_a_swarm_that_loses_a_node_and_wins_one(
    model: Path, daemons: Daemons, tmp_path: Path
) -> None:
    with live_gateway(daemons.addresses, tmp_path, model) as url, browsing(url) as page:
        expect(page.locator(".card.serving")).to_have_count(3)
        page.evaluate("window.same = true")
        _tables_and_links_are_filled(page)
        _ask(page)
        shoot(page, "swarm-light")

        shown_s = _seconds_shown(page, "node-3")
        assert 0 < shown_s <= TTL_S
        daemons.kill(daemons.nodes[2])
        killed = time.monotonic()
        # Long before its record expires.
        expect(page.locator(".card.failing")).to_contain_text("node-3", timeout=FAILING_MS)
        lost = page.locator(".card.lost")
        expect(lost).to_have_count(1, timeout=(TTL_S + SLACK_S) * 1000)
        # The record may have been renewed between our look at the page and the kill.
        assert time.monotonic() - killed < TTL_S + SLACK_S
        expect(lost).to_contain_text("node-3")
        expect(page.locator("#blocks-words")).to_have_text("No node holds blocks 3:4")
        expect(page.locator("#nodes tr.lost td").last).to_contain_text("expired")

        with ExitStack() as stack:
            flags = ("--initial-peers", *daemons.addresses, "--torch-dtype", "float32")
            flags += ("--threads", "1", "--record-ttl-s", str(TTL_S))
            starting = start_node(stack, model, HOSTILE, SPANS[2], tmp_path, flags)
            wait_until_serving(starting, time.monotonic() + READY_S)
            expect(page.locator(".card.serving")).to_have_count(3)
            joined = page.locator(".card.serving .title").get_by_text(HOSTILE, exact=True)
            expect(joined).to_be_visible()
            words = "All 4 blocks are held, by 1 node each"
            expect(page.locator("#blocks-words")).to_have_text(words)
            _ask(page)
            expect(page.locator("#play-hops")).to_contain_text(HOSTILE)
            shoot(page, "swarm-after-a-loss")
        assert page.locator("img").count() == 0
        assert page.evaluate("window.same") is True
        said = page.locator("#events").inner_text()
        assert all(kind in said for kind in ("failing", "lost", "hole", "joined", "healed"))


def test_page_is_accessible_in_both_themes_and_on_a_phone(
    model: Path, daemons: Daemons, tmp_path: Path
) -> None:
    with live_gateway(daemons.addresses, tmp_path, model) as url:
        for scheme, width in (("light", 1400), ("dark", 1400), ("light", PHONE), ("dark", PHONE)):
            assert scheme in ("light", "dark")
            with browsing(url, scheme=scheme, width=width) as page:  # type: ignore[arg-type]
                expect(page.locator(".card.serving")).to_have_count(3)
                _ask(page)
                page.locator(".card .face").first.click()
                expect(page.locator("#details")).to_be_visible()
                assert violations(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                shoot(page, f"swarm-{scheme}-{width}")
                # Three nodes are too few for the page to be offered.
                expect(page.locator("#link-topology")).to_be_hidden()
                page.evaluate("location.hash = '#topology'")
                expect(page.locator("#conclusion")).to_contain_text("too few", timeout=30_000)
                expect(page.locator("#barcode svg")).to_be_visible(timeout=30_000)
                assert violations(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                shoot(page, f"topology-{scheme}-{width}")


def test_page_behind_keys_asks_once(model: Path, daemons: Daemons, tmp_path: Path) -> None:
    key = "a-key-of-some-length-1"
    with (
        live_gateway(daemons.addresses, tmp_path, model, api_key=key) as url,
        browsing(url) as page,
    ):
        expect(page).to_have_url(f"{url}/login")
        page.locator("input[name=key]").fill(key)
        page.keyboard.press("Enter")
        expect(page.locator(".card.serving")).to_have_count(3)
        _ask(page)


def _tables_and_links_are_filled(page: Page) -> None:
    expect(page.locator("#nodes tr")).to_have_count(3)
    expect(page.locator("#nodes tr").first).to_contain_text("float32")
    expect(page.locator("#links-words")).to_have_text(
        re.compile("[1-3] measured"), timeout=LINKS_MS
    )
    page.locator("summary").click()
    expect(page.locator("#links tr").first).to_contain_text("ms")
    page.locator("summary").click()


def _ask(page: Page) -> None:
    """A prompt in the playground: text comes in pieces, through a chain that lights up."""
    page.fill("#play-prompt", "hello the capital")
    page.fill("#play-tokens", "200")
    page.fill("#play-heat", "0")
    page.click("#play-send")
    expect(page.locator(".answer .token").first).to_be_visible()
    expect(page.locator(".card.lit")).to_have_count(3)
    expect(page.locator("#play-hops li")).to_have_count(3)
    expect(page.locator("#play-send")).to_be_enabled()
    assert page.locator(".answer .token").count() > 5
    expect(page.locator("#play-figures")).to_contain_text("tokens")


def _seconds_shown(page: Page, name: str) -> int:
    row = page.locator("#nodes tr").filter(has_text=name)
    found = re.search(r"expires in (\d+) s", row.inner_text())
    assert found, row.inner_text()
    return int(found[1])
