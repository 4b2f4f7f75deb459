"""The page in Chromium, fed by hand."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chains import Hop
from tests.browser.browsing import PHONE, WIDE, browsing, shoot
from tests.browser.served import served
from tests.dashboard.records import record
from tests.dashboard.test_state import PLAYED, Scripted

HOSTILE = "<img src=x onerror=alert(1)>"


def test_page_shows_nodes_as_they_come_and_go_and_their_names_as_text() -> None:
    now = time.time()
    whole = [record(f"peer-{at}", (at, at + 4), at=now, public_name=f"n{at}") for at in (0, 4, 8)]
    with served() as server, browsing(server.url) as page:
        cards = page.locator(".card.serving")
        expect(page.locator("#graph-empty")).to_have_text("Looking for nodes …")
        server.look(whole, now)
        expect(cards).to_have_count(3)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#blocks-words")).to_have_text("All 12 blocks are held, by 1 node each")
        stranger = record("peer-x", (4, 12), at=now, public_name=HOSTILE)
        server.look([*whole, stranger], now + 1)
        expect(cards).to_have_count(4)
        expect(page.locator("#nodes bdi").get_by_text(HOSTILE, exact=True)).to_be_visible()
        expect(page.locator("#events li").first).to_contain_text(f"{HOSTILE} joined")
        assert page.locator("img").count() == 0
        renewed = [record(one.peer_id, one.span, at=now + 9, public_name="n") for one in whole[:2]]
        server.look(renewed, now + 10)
        server.tick(now + 31)
        expect(page.locator(".card.lost")).to_have_count(2)
        expect(page.locator("#blocks-words")).to_have_text("No node holds blocks 8:12")
        expect(page.locator("#events li").first).to_contain_text("have no holder")


def test_audits_of_each_node() -> None:
    now = time.time()
    nodes = [record(f"peer-{at}", (at, at + 4), at=now, public_name=f"n{at}") for at in (0, 4, 8)]
    audits = AuditHistory(None)
    for _ in range(3):
        audits.record_passed(PeerId("peer-0"))
    audits.bar(PeerId("peer-4"), f"wrong activations of blocks 4:8: {HOSTILE}")
    with served() as server, browsing(server.url) as page:
        server.look(nodes, now)
        expect(page.locator(".card.serving")).to_have_count(3)
        expect(page.locator(".card.barred")).to_have_count(0)
        server.audit(audits)
        server.look(nodes, now + 1)
        barred = page.locator(".card.barred")
        expect(barred).to_have_count(1)
        expect(barred.locator(".foot")).to_have_text("barred by an audit")
        cells = page.locator("#nodes td[data-label=Audits]")
        expect(cells).to_have_text(["3 passed", "barred", "\u2013"])
        barred.locator("button").click()
        expect(page.locator("#details-list")).to_contain_text(
            f"this machine's clients do not use it: wrong activations of blocks 4:8: {HOSTILE}"
        )
        assert page.locator("img").count() == 0
        shoot(page, "audits")


def test_loss_curves_of_trainings() -> None:
    now = time.time()
    steps = list(range(1, 41))
    training = {
        "name": HOSTILE,
        "step": 40,
        "loss": 1.25,
        "learning_rate": 0.001,
        "at": now - 3,
        "steps": steps,
        "losses": [4 - step / 15 for step in range(40)],
        "eval_losses": [3.0 - step / 20 if step % 10 == 9 else None for step in range(40)],
    }
    with served() as server, browsing(server.url) as page:
        panel = page.locator("#trainings")
        server.look([record("peer-a", at=now)], now)
        expect(page.locator(".card.serving")).to_have_count(1)
        expect(panel).to_be_hidden()
        server.train({"/tmp/out": training})
        expect(panel.locator("h3")).to_have_text(HOSTILE)
        expect(panel.locator(".note")).to_contain_text("step 40, loss 1.25, learning rate 0.001")
        expect(panel.locator(".canvas")).to_have_attribute(
            "aria-label", re.compile(r"Loss of .* loss 1.4, validation 1.05")
        )
        expect(panel.locator(".empty")).to_be_hidden()
        panel.scroll_into_view_if_needed()
        shoot(page, "fine-tuning")
        server.train({"/tmp/out": {**training, "step": 41, "at": now}})
        expect(panel.locator(".note")).to_contain_text("step 41")
        server.train({})
        expect(panel).to_be_hidden()


@pytest.mark.slow
def test_model_called_proto_is_a_model_like_any_other() -> None:
    now = time.time()
    with served() as server, browsing(server.url) as page:
        names = ["__proto__", "constructor", "</option><script>alert(1)</script>"]
        records = [record(f"p{n}", at=now, model_id=n, model_name=n) for n in names]
        server.look(records, now)
        expect(page.locator("#model option")).to_have_count(3)
        for name in names:
            page.select_option("#model", value=name)
            expect(page.locator(".card.serving")).to_have_count(1)


@pytest.mark.slow
def test_chains_follow_a_window_that_turns() -> None:
    """Cytoscape warns of a line that it cannot draw, and `browsing` of whatever it says."""
    now = time.time()
    whole = [record(f"peer-{at}", (at, at + 4), at=now) for at in (0, 4, 8)]
    hops = tuple(Hop(PeerId(one.peer_id), Span(*one.span)) for one in whole)
    activity = Scripted()
    activity.open = [replace(PLAYED, model_id=ModelId(whole[0].model_id), hops=hops)]
    with served() as server, browsing(server.url) as page:
        server.look(whole, now)
        server.tick(now, activity)
        expect(page.locator(".card.serving")).to_have_count(3)
        for width in (PHONE, WIDE, PHONE):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(500)


@pytest.mark.slow
def test_page_finds_the_server_again_and_says_so() -> None:
    now = time.time()
    refused = r"ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|INCOMPLETE|ERR_CONNECTION_RESET"
    with served() as first:
        first.look([record("a", at=now, public_name="before")], now)
        port = int(first.url.rpartition(":")[2])
        browser = browsing(first.url, forgiven=refused)
        page = browser.__enter__()
        expect(page.locator(".card .title")).to_have_text("before")
        page.evaluate("window.same = true")
    try:
        expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
        with served(port) as second:
            second.look([record("b", at=now, public_name="after")], now)
            expect(page.locator(".card .title")).to_have_text("after")
            expect(page.locator("#connection")).to_have_text("live")
            assert page.evaluate("window.same") is True
    finally:
        browser.__exit__(None, None, None)


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard() -> None:
    now = time.time()
    with served() as server, browsing(server.url) as page:
        server.look([record("peer-a", at=now, public_name="ada")], now)
        expect(page.locator(".card.serving")).to_have_count(1)
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        seen: set[str] = set()
        for _ in range(25):
            page.keyboard.press("Tab")
            seen.add(
                str(page.evaluate("document.activeElement.id || document.activeElement.className"))
            )
        assert {"theme", "all-links", "zoom-in", "face", "name"} <= seen
        page.locator(".card .face").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#details")).to_be_visible()
        expect(page.locator("#h-details")).to_have_text("ada")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"


@pytest.mark.slow
def test_theme_is_chosen_and_kept() -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with served() as server, browsing(server.url, scheme="light") as page:
        light = page.evaluate(background)
        button = page.locator("#theme")
        expect(button).to_have_text("Theme: auto")
        button.click()
        button.click()
        expect(button).to_have_text("Theme: dark")
        dark = page.evaluate(background)
        assert dark != light
        page.reload()
        expect(button).to_have_text("Theme: dark")
        assert page.evaluate(background) == dark
