"""Prompts as they are typed or piped: only text can be told to a model, and not without end."""

from __future__ import annotations

import io
import sys

from nesa_node.core.errors import ConfigError
from nesa_node.core.waiting import waiting

MAX_PROMPT_CHARS = 1 << 26
"""Of stdin: more than any model holds."""


def keep_odd_bytes() -> None:
    """Let stdin carry bytes that are not UTF-8 as lone surrogates, so that its next lines can
    still be read. `check_text` finds them."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def read_prompt() -> str:
    """All of stdin. A person at a terminal is told at once that a prompt is wanted.

    Raises `ConfigError` where it is not UTF-8, or longer than `MAX_PROMPT_CHARS`.
    """
    keep_odd_bytes()
    if sys.stdin.isatty():
        print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr, flush=True)
        text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    else:
        with waiting("the prompt on stdin to end"):
            text = sys.stdin.read(MAX_PROMPT_CHARS + 1)
    if len(text) > MAX_PROMPT_CHARS:
        raise ConfigError(f"the prompt on stdin has more than {MAX_PROMPT_CHARS} characters")
    return text


def check_text(text: str, what: str) -> str:
    """`text`. Raises `ConfigError` if bytes of it were not UTF-8; `what` names it."""
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
