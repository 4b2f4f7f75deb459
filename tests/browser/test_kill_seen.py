"""A node is killed while the page, the command line and curl watch: what each shows, and when.

`pytest -s tests/browser/test_kill_seen.py` prints it; the page is in `build/screenshots/kill-*`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from nesa_node.core.ids import Span
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path
from tests.api.live import live_gateway
from tests.browser.browsing import browsing, chromium, shoot
from tests.swarms import Daemons, daemons

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPANS = (Span(0, 10), Span(10, 20), Span(20, 30))
LOOKS_S = (1.0, 3.0, 10.0)
MISSING = "waiting for a node in place of one that failed: blocks 10:20"
PROMPT = "Tell me a very long story about a fox, a crow and a river, with many details."
TOKENS = 300
ENDS_S = 120.0


@dataclass(frozen=True)
class Program:
    """A client in a process of its own, whose output is in files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def wait_for_text(self, count: int) -> None:
        deadline = time.monotonic() + ENDS_S
        while len(self.out.read_text(errors="replace")) < count:
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)


@contextmanager
def program(folder: Path, name: str, *command: str) -> Iterator[Program]:
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        yield Program(process, out, err)
    finally:
        process.kill()
        process.wait()


def curl(folder: Path, url: str) -> tuple[str, ...]:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    body |= {"temperature": 0, "stream": True, "ignore_eos": True, "model": "SmolLM2-135M-Instruct"}
    path = folder / "body.json"
    path.write_text(json.dumps(body))
    kind = "content-type: application/json"
    return "curl", "-sN", "-H", kind, "-d", f"@{path}", f"{url}/v1/chat/completions"


def test_page_command_line_and_curl_say_within_seconds_what_they_wait_for(tmp_path: Path) -> None:
    chromium()
    model = demo_model_path(default_cache_dir())
    with ExitStack() as stack:
        swarm = stack.enter_context(daemons(model, tmp_path))
        for span in SPANS:
            swarm.start(span)
        url = stack.enter_context(live_gateway(swarm.addresses, tmp_path, model))
        page = stack.enter_context(browsing(url))
        generate = [sys.executable, "-m", "nesa_node", "generate", str(model), PROMPT]
        generate += ["--max-new-tokens", str(TOKENS), "--torch-dtype", "float32"]
        generate += ["--initial-peers", *swarm.addresses]
        command = stack.enter_context(program(tmp_path, "generate", *generate))
        stream = stack.enter_context(program(tmp_path, "curl", *curl(tmp_path, url)))
        expect(page.locator(".card.serving")).to_have_count(3)
        page.fill("#play-prompt", PROMPT)
        page.fill("#play-tokens", str(TOKENS))
        page.click("#play-send")
        expect(page.locator(".answer .token").first).to_be_visible(timeout=ENDS_S * 1000)
        command.wait_for_text(20)
        stream.wait_for_text(500)
        seen = _kill_and_look(swarm, page, command, stream)
        for after_s, shown in seen.items():
            print(f"\n--- {after_s:g} s after the kill", *shown, sep="\n")
        _check(seen)
        swarm.start(SPANS[1])
        _all_go_on(page, command, stream)


Seen = dict[float, tuple[str, str, str]]


def _kill_and_look(swarm: Daemons, page: Page, command: Program, stream: Program) -> Seen:
    swarm.kill(swarm.nodes[1])
    killed = time.monotonic()
    seen: Seen = {}
    for after_s in LOOKS_S:
        # The page's own events are handled while it waits, unlike in `time.sleep`.
        page.wait_for_timeout(max(0.0, killed + after_s - time.monotonic()) * 1000)
        seen[after_s] = _page_shows(page), _command_shows(command), _stream_shows(stream)
        shoot(page, f"kill-{after_s:g}s")
    return seen


def _check(seen: Seen) -> None:
    page, _, _ = seen[3.0]
    assert "node-2 failing" in page
    assert "No node holds blocks 10:20" in page
    page, command, stream = seen[10.0]
    for shown in (command, stream):
        assert MISSING in shown
        assert re.search(r"\d+ s of at most \d+ s", shown)
    assert page.count(MISSING) >= 2, "playground and table of sessions"


def _all_go_on(page: Page, command: Program, stream: Program) -> None:
    expect(page.locator("#play-send")).to_be_enabled(timeout=ENDS_S * 1000)
    expect(page.locator("#play-wait")).to_be_hidden()
    assert page.locator(".answer.failed").count() == 0
    assert command.process.wait(ENDS_S) == 0
    assert stream.process.wait(ENDS_S) == 0
    assert stream.out.read_text().rstrip().endswith("data: [DONE]")


def _page_shows(page: Page) -> str:
    cards = page.locator(".card .face").all()
    states = [
        f"{card.locator('.title').inner_text()} "
        f"{(card.locator('..').get_attribute('class') or '').split()[1]}"
        for card in cards
    ]
    waits = [wait for wait in page.locator(".wait").all_inner_texts() if wait]
    return (
        f"page: {', '.join(states)}; {page.locator('#blocks-words').inner_text()}; "
        f"{page.locator('#note-nodes').inner_text()}; {' | '.join(waits) or 'no wait'}"
    )


def _command_shows(command: Program) -> str:
    lines = command.err.read_text().splitlines()
    text = command.out.read_text(errors="replace")
    return f"generate: {len(text)} characters; {' | '.join(lines) or 'nothing on stderr'}"


def _stream_shows(stream: Program) -> str:
    lines = stream.out.read_text().splitlines()
    events = sum(line.startswith("data:") for line in lines)
    comments = [line for line in lines if line.startswith(":")]
    return f"curl: {events} events; {' | '.join(comments) or 'no comment'}"
