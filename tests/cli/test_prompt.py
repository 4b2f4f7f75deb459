"""Prompts whose bytes are not UTF-8."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.chat import _Conversation
from nesa_node.cli.prompt import check_text
from nesa_node.core.errors import ConfigError
from tests.cli.test_app import PEER


def piped(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))


def test_a_prompt_on_stdin_that_is_not_utf_8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"a line\ncaf\xe9")
    assert run_command(["generate", "m", "--initial-peers", PEER]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the prompt is not UTF-8 (line 2, character 4)")


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
    monkeypatch.setattr(talk, "_turn", lambda line, *, interactive: told.append(line))
    talk.run()
    assert told == ["hello", "again"]
    assert capsys.readouterr().err.startswith("error: this line is not UTF-8")


def test_text_of_any_script_is_taken() -> None:
    assert check_text("café 日本 🙂", "it") == "café 日本 🙂"
    with pytest.raises(ConfigError, match=r"it is not UTF-8 \(line 1, character 1\)"):
        check_text("\ud800", "it")
