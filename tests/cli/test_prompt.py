"""Prompts whose bytes are not UTF-8."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.commands.generate import _Conversation
from nesa_node.cli.standard_streams import check_utf8, read_prompt
from nesa_node.core.errors import ConfigError
from nesa_node.core.wait_tracking import WaitTracker
from tests.cli.test_app import PEER
from tests.cli.told import told_now


def piped(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))


def test_a_prompt_on_stdin_that_is_not_utf_8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"a line\ncaf\xe9")
    assert run_command(["generate", "m", "--initial-peers", PEER]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the prompt is not UTF-8 (line 2, character 4)")


class Typing(io.StringIO):
    """Standard input that hears what is told of waiting while it is read."""

    def __init__(self, text: str, *, terminal: bool) -> None:
        super().__init__(text)
        self._terminal = terminal
        self.told: list[str] = []

    def isatty(self) -> bool:
        return self._terminal

    def read(self, size: int | None = -1) -> str:
        self.told += told_now()
        return super().read(size)


def test_a_person_is_told_at_once_that_a_prompt_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing = Typing("hello", terminal=True)
    monkeypatch.setattr(sys, "stdin", typing)
    with WaitTracker().activate():
        assert read_prompt() == "hello"
    assert "Ctrl-D" in capsys.readouterr().err
    assert typing.told == []


def test_a_pipe_that_gives_no_prompt_is_told_as_a_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing = Typing("hello", terminal=False)
    monkeypatch.setattr(sys, "stdin", typing)
    with WaitTracker().activate():
        assert read_prompt() == "hello"
    assert capsys.readouterr().err == ""
    assert typing.told == ["the prompt on stdin to end"]


def test_a_prompt_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nesa_node.cli.standard_streams.MAX_PROMPT_CHARS", 10)
    piped(monkeypatch, b"x" * 10)
    assert read_prompt() == "x" * 10
    piped(monkeypatch, b"x" * 20_000)
    with pytest.raises(ConfigError, match="more than 10 characters"):
        read_prompt()
    assert len(sys.stdin.read()) == 20_000 - 11


def test_a_prompt_argument_that_is_not_utf_8_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["generate", "m", "\udcff\udcfe", "--initial-peers", PEER]) == 2
    assert "error: the prompt is not UTF-8" in capsys.readouterr().err


def test_instructions_that_are_not_utf_8_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["chat", "m", "--system", "\udcff", "--initial-peers", PEER]) == 2
    assert "error: --system is not UTF-8" in capsys.readouterr().err


def test_a_conversation_goes_on_after_a_line_that_is_not_utf_8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"hello\ncaf\xe9\nagain\n/exit\n")
    nothing: Any = None
    talk = _Conversation(nothing, nothing, nothing, 64, None, lambda: None)
    told: list[str] = []
    monkeypatch.setattr(talk, "_run_turn", lambda line, *, interactive: told.append(line))
    talk.run()
    assert told == ["hello", "again"]
    assert capsys.readouterr().err.startswith("error: this line is not UTF-8")


def test_text_of_any_script_is_taken() -> None:
    assert check_utf8("café 日本 🙂", "it") == "café 日本 🙂"
    with pytest.raises(ConfigError, match=r"it is not UTF-8 \(line 1, character 1\)"):
        check_utf8("\ud800", "it")
