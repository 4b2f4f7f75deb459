"""Text of a model on a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from nesa_node.cli.text_generation import _TimedStreamer


class _Out(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_words_that_nodes_computed_are_no_commands_to_a_terminal(is_terminal: bool) -> None:
    out = _Out(is_terminal=is_terminal)
    tokenizer: Any = None
    streamer = _TimedStreamer(tokenizer, out)
    streamer.on_finalized_text("a\tb\n\x1b[2J", stream_end=True)
    assert out.getvalue() == ("a\tb\n\\x1b[2J\n" if is_terminal else "a\tb\n\x1b[2J\n")
