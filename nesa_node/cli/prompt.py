"""Reading of prompts from a terminal or a pipe, with checks of encoding and length."""

from __future__ import annotations

import io
import sys

from nesa_node.core.errors import ConfigError
from nesa_node.core.wait_tracking import track_wait

MAX_PROMPT_CHARS = 1 << 26
"""Longest prompt on stdin, in characters: more than the context of any model."""


def accept_invalid_utf8() -> None:
    """Let stdin decode invalid UTF-8 as lone surrogates, which `check_utf8` finds.

    So the lines after it can still be read.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def read_prompt() -> str:
    """Read all of stdin; at a terminal print at once that a prompt is expected.

    Raises `ConfigError` if it is longer than `MAX_PROMPT_CHARS`. Invalid UTF-8 is kept for
    `check_utf8`.
    """
    accept_invalid_utf8()
    if sys.stdin.isatty():
        print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr, flush=True)
        text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    else:
        with track_wait("the prompt on stdin to end"):
            text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    if len(text) > MAX_PROMPT_CHARS:
        raise ConfigError(f"the prompt on stdin has more than {MAX_PROMPT_CHARS} characters")
    return text


def check_utf8(text: str, what: str) -> str:
    """Return `text`; raise `ConfigError` if its bytes were not UTF-8. `what` names it there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        at = error.start - text.rfind("\n", 0, error.start)
        raise ConfigError(
            f"{what} is not UTF-8 (line {line}, character {at}): give it in that encoding, as "
            "`iconv -t UTF-8` writes it"
        ) from None
    return text
