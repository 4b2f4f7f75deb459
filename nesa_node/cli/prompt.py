"""Prompts as they are typed or piped: only text can be told to a model."""

from __future__ import annotations

import io
import sys

from nesa_node.core.errors import ConfigError


def keep_odd_bytes() -> None:
    """Let stdin carry bytes that are not UTF-8 as lone surrogates, so that its next lines can
    still be read. `check_text` finds them."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


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
