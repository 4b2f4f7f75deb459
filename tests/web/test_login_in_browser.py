"""The way in with a real browser, which decides itself what it sends along and what it runs."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web.key_store import KeyStore
from tests.web.tiny_gateway import gate, new_key

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

# The colours of text and of what is behind it, for each element that shows text.
_COLOURS = """() => [...document.querySelectorAll('h1, label, p, input, button')].map(element => {
    let behind = element;
    const paint = e => getComputedStyle(e).backgroundColor;
    while (paint(behind) === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    return [element.tagName, getComputedStyle(element).color, paint(behind)];
})"""


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        await browser.close()


async def ask(page: Page, path: str, options: str = "{}") -> str:
    """What a fetch of the page gets: status and text, or how it failed."""
    fetch = f"fetch({path!r}, {options})"
    told = f"{fetch}.then(async r => r.status + ' ' + await r.text(), e => 'failed')"
    return str(await page.evaluate(told))


async def enter(page: Page, address: HttpAddress, key: str) -> None:
    await page.goto(f"http://{address}/")
    assert page.url == f"http://{address}/login"
    await page.keyboard.type(key)
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"http://{address}/")


async def test_one_key_typed_once_lets_the_page_ask_until_it_leaves(
    chromium: Browser, tmp_path: Path
) -> None:
    key = new_key(tmp_path / "keys.json")
    async with gate(tmp_path / "keys.json") as (_, address):
        page = await chromium.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await enter(page, address, key)
        assert errors == []
        assert await page.evaluate("document.cookie") == ""
        assert await ask(page, "/v1/echo", "{method: 'POST', body: 'abc'}") == '200 {"bytes":3}'
        assert "alice" in await ask(page, "/v1/whoami")
        assert await ask(page, "/logout", "{method: 'POST', redirect: 'manual'}") == "0 "
        assert (await ask(page, "/v1/whoami")).startswith("401 ")


async def test_a_wrong_key_is_told_on_the_page(chromium: Browser, tmp_path: Path) -> None:
    new_key(tmp_path / "keys.json")
    async with gate(tmp_path / "keys.json") as (_, address):
        page = await chromium.new_page()
        await page.goto(f"http://{address}/")
        await page.fill("#key", "wrong")
        await page.click("button")
        assert "is wrong" in await page.inner_text("[role=alert]")
        assert await page.evaluate("document.activeElement.id") == "key"


async def test_a_page_of_another_origin_cannot_use_what_the_browser_knows(
    chromium: Browser, tmp_path: Path
) -> None:
    """`localhost` and `127.0.0.1` are two sites, and two ports of one are two origins."""
    paths = tmp_path / "keys.json", tmp_path / "others.json"
    key = new_key(paths[0])
    async with gate(paths[0]) as (ours, address), gate(paths[1]) as (_, strange):
        context = await chromium.new_context()
        await enter(await context.new_page(), address, key)
        page = await context.new_page()
        for origin in (f"http://127.0.0.1:{strange.port}", f"http://localhost:{strange.port}"):
            # Its policy forbids nothing to it, as its author would have it.
            await page.route(origin + "/", lambda route: route.fulfill(body="<p>evil"))
            await page.goto(origin + "/")
            target = f"http://{address}/v1/stream"
            simple = "{method: 'POST', mode: 'no-cors', credentials: 'include', body: 'x'}"
            for options in (simple, "{method: 'POST', credentials: 'include'}", "{}"):
                assert await ask(page, target, options) in ("0 ", "failed")
            assert ours.streams == 0
            post = "f => {const e = document.createElement('form'); e.method = 'post';"
            post += "e.action = f; document.body.append(e); e.submit()}"
            async with page.expect_navigation():
                await page.evaluate(post, target)
            assert "origin_not_allowed" in await page.content()
            assert ours.streams == 0


async def test_a_revoked_key_ends_what_its_page_may(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = new_key(path)
    async with gate(path) as (_, address):
        page = await chromium.new_page()
        await enter(page, address, key)
        KeyStore(path).revoke("alice")
        await page.wait_for_timeout(1100)
        await page.reload()
        assert page.url == f"http://{address}/login"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_a_phone_and_can_be_read_in_light_and_dark(
    chromium: Browser, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    new_key(tmp_path / "keys.json")
    async with gate(tmp_path / "keys.json") as (_, address):
        page = await chromium.new_page(color_scheme=scheme, viewport={"width": 390, "height": 700})
        await page.goto(f"http://{address}/login")
        await page.fill("#key", "wrong")
        await page.click("button")
        await page.wait_for_selector("[role=alert]")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        shown = await page.evaluate(_COLOURS)
    assert {"H1", "LABEL", "P", "INPUT", "BUTTON"} == {tag for tag, _, _ in shown}
    for tag, text, behind in shown:
        assert contrast(text, behind) >= 4.5, (tag, text, behind)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio of two opaque colours, as CSS computes them: `rgb(r, g, b)`."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
