"""A page in a real browser, which notes everything that is wrong with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Dialog, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDE, PHONE = 1400, 390
WAIT_MS = 15_000

# A violation of the policy is an error in the console too, but not in every browser.
_NOTE_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
"""


def chromium() -> str:
    """Its path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here: `make browser` installs one as root on Debian")
    return found


@contextmanager
def browsing(
    url: str,
    *,
    width: int = WIDE,
    scheme: Literal["light", "dark"] = "light",
    forgiven: str | None = None,
) -> Iterator[Page]:
    """Open `url`. In the end the page must not have had an error, a violation of its policy or a
    dialog; `forgiven` is a pattern of errors that are meant to be.
    """
    with sync_playwright() as playwright:
        # Root may not use Chromium's sandbox.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            context.set_default_timeout(WAIT_MS)
            context.add_init_script(_NOTE_VIOLATIONS)
            page = context.new_page()
            wrong: list[str] = []
            page.on("console", lambda said: wrong.append(said.text) if _bad(said.type) else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))

            def refuse(dialog: Dialog) -> None:
                wrong.append(dialog.message)
                dialog.dismiss()

            page.on("dialog", refuse)
            page.goto(url)
            yield page
            wrong = [each for each in wrong if not (forgiven and re.search(forgiven, each))]
            assert not wrong, wrong
        finally:
            browser.close()


def _bad(kind: str) -> bool:
    return kind in ("error", "warning")


def shoot(page: Page, name: str) -> None:
    """For people to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
