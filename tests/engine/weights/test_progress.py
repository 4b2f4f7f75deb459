from __future__ import annotations

import io

import pytest
from structlog.testing import capture_logs

from nesa_node.engine.weights.files import show_progress


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 11.0, 16.0, 17.0])
    monkeypatch.setattr("nesa_node.engine.weights.files.time.monotonic", lambda: next(seconds))
    with capture_logs() as logs, show_progress() as show:
        for done in (1 << 20, 2 << 20, 3 << 20, 4 << 20):
            show("loading", done, 4 << 20)
    assert [line["done_mib"] for line in logs] == [1, 3, 4]
    assert logs[0]["event"] == "loading_progressed"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with show_progress() as show:
        show("loading blocks 0:2", 50, 100)
        show("loading blocks 0:2", 100, 100)
    assert "loading blocks 0:2" in terminal.getvalue()
