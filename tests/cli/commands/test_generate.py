"""Conversations without a swarm: lengths, and what ends them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nesa_node.cli.app import run_command
from nesa_node.cli.client_model import ReconnectingModel
from nesa_node.cli.commands.generate import _Conversation
from nesa_node.cli.text_generation import GenerationParams
from nesa_node.core.errors import ContextLengthError, MissingBlocksError
from nesa_node.core.known_swarms import KnownSwarmStore
from nesa_node.core.settings.declaration import default_known_swarms_dir
from nesa_node.core.settings.models import ClientConfig
from tests.cli.test_app import PEER
from tests.cli.test_prompt import piped
from tests.cli.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It holds 512 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class _Words:
    """A tokenizer with a token for each letter of all messages."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
        letters = "".join(message["content"] for message in messages)
        return {"input_ids": torch.zeros(1, len(letters), dtype=torch.long)}


class _Talk(_Conversation):
    """A conversation whose answers, of up to 4 tokens, are known before."""

    def __init__(self, max_length: int, answers: list[str | BaseException]) -> None:
        model: Any = None
        tokenizer: Any = _Words()
        sampling = GenerationParams(max_new_tokens=4)
        super().__init__(model, tokenizer, sampling, max_length, None, lambda: None)
        self._answers = answers

    def _generate_answer(self, ids_1L: torch.Tensor) -> str:
        said = self._answers.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said

    def said(self) -> list[str]:
        return [message["content"] for message in self._messages]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--draft", "/nowhere"], 3, "/nowhere is no folder"),
        (["--draft", "lookup", "--private", "ckks"], 2, "draft=lookup with private=ckks"),
    ],
)
def test_drafts_that_cannot_be_made_are_refused_in_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    argv = ["generate", str(model), "hello", "--initial-peers", PEER, *flags]
    assert run_command(argv) == code
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ")
    assert words in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("lengths", "code", "words"),
    [
        (["--max-length", "-5"], 2, "--max-length must be at least 1"),
        (["--max-length", "0"], 2, "--max-length must be at least 1"),
        (["--max-length", "100000"], 8, "--max-length 100000 is more than the 512 tokens"),
        (["--max-length", "10"], 8, "lower --max-new-tokens or raise --max-length (at most 512)"),
        # The template's own words take room, too.
        (
            ["--max-length", "33", "--max-new-tokens", "31"],
            8,
            "no room in 33 tokens (--max-length)",
        ),
        (["--max-new-tokens", "5000"], 8, "5000 of an answer (--max-new-tokens): lower"),
        (["--max-length", "34", "--max-new-tokens", "31"], 0, ""),
    ],
)
def test_lengths_that_leave_no_room_are_told_before_the_first_message(
    lengths: list[str],
    code: int,
    words: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    piped(monkeypatch, b"/exit\n")
    assert run_command(["chat", str(model), "--initial-peers", PEER, *lengths]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("error: ") == (code != 0)
    assert "Traceback" not in said


def test_a_piped_message_that_is_too_long_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"hello\nhello\n")
    with pytest.raises(ContextLengthError) as caught:
        _Talk(15, ["hi"]).run()
    assert str(caught.value) == (
        "no room in 15 tokens (--max-length) for 12 of the conversation and 4 of an answer "
        "(--max-new-tokens): /reset starts over"
    )
    # `run_command` prints it.
    assert capsys.readouterr().err == ""


def test_a_typed_message_that_is_too_long_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"a message that is long\nhello\n/exit\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    talk = _Talk(16, ["hi"])
    talk.run()
    assert talk.said() == ["hello", "hi"]
    assert "an answer (--max-new-tokens): shorten the message\n" in capsys.readouterr().err


def test_a_typed_message_that_the_swarm_fails_is_left_out_and_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"hello\nagain\nagain\n/exit\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    talk = _Talk(64, ["hi", MissingBlocksError([(0, 4)], "no node\x1b[2J"), "hi again"])
    model: Any = object()
    monkeypatch.setattr(talk, "_reconnect", lambda: model)
    talk.run()
    assert talk._model is model
    assert talk.said() == ["hello", "hi", "again", "hi again"]
    assert "error: no node\\x1b[2J\n" in capsys.readouterr().err


def test_a_piped_message_that_the_swarm_fails_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped(monkeypatch, b"hello\nagain\n")
    with pytest.raises(MissingBlocksError):
        _Talk(64, [MissingBlocksError([(0, 4)], "no node"), "hi"]).run()


def test_ctrl_c_at_the_prompt_clears_the_line() -> None:
    code = (
        "from nesa_node.cli.commands.generate import _Conversation as C;"
        "talk = C(None, None, None, 64, None, print);"
        "talk._run_turn = lambda line, **_: print('told', line);"
        "talk.run()"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        try:
            read_until(ours, b"> ")
            os.write(ours, b"half a li")
            read_until(ours, b"half a li")
            # A signal just before Python waits for a key is noticed with the next one only.
            while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            read_until(ours, b"(Ctrl-D ends)\r\n> ")
            os.write(ours, b"hello\n")
            read_until(ours, b"told hello\r\n> ")
            os.write(ours, b"/exit\n")
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, words: bytes) -> None:
    """Escapes of line editing are left out."""
    shown = b""
    while words not in shown:
        assert select.select([terminal], [], [], 20)[0], shown
        shown = re.sub(rb"\x1b\[[0-9;?]*[a-z]", b"", shown + os.read(terminal, 1024))


def test_a_model_is_opened_again_where_a_node_was_started_on_another_port(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    known = KnownSwarmStore(default_known_swarms_dir())
    asked = ClientConfig(model=str(model))
    first, second = PEER, PEER.replace("4001", "4002")
    with known.register_node([first], "tiny", None):
        following = ReconnectingModel(asked)
        given = ReconnectingModel(asked.model_copy(update={"initial_peers": (first,)}))
    with following, given:
        following.open()
        # No node runs.
        assert following.reconnect() is None
        with known.register_node([first], "tiny", None):
            assert following.reconnect() is None
        with known.register_node([second], "tiny", None):
            assert following.reconnect() is not None
            assert following.reconnect() is None
            assert given.reconnect() is None
    assert capsys.readouterr().err.count("using the node of tiny on this machine") == 2
