"""Rewriting of command-line arguments that the parser does not accept as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

DEFAULT_API_ADDRESS = "127.0.0.1:8000"
DEFAULT_WATCH_INTERVAL_S = "2"
_API_ADDRESS_PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|localhost|[0-9.]+):[0-9]+")


def rewrite_argv(argv: Sequence[str]) -> Sequence[str]:
    """Apply all rewriting of this module."""
    return separate_prompt(repeat_list_flags(fill_optional_values(argv)))


def fill_optional_values(tokens: Sequence[str]) -> Sequence[str]:
    """Insert the default address after an `--api` without one, and the interval after `--watch`."""
    filled: list[str] = []
    for token, following in zip(tokens, (*tokens[1:], ""), strict=False):
        filled.append(token)
        if token == "--api" and not _API_ADDRESS_PATTERN.fullmatch(following):
            filled.append(DEFAULT_API_ADDRESS)
        elif token == "--watch" and not _is_number(following):
            filled.append(DEFAULT_WATCH_INTERVAL_S)
    return filled


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_LIST_FLAGS = frozenset({"--initial-peers", "--host-maddrs", "--announce-maddrs"})
_PEER_ADDRESS_PATTERN = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/.*|(\[[0-9a-fA-F:.]+\]|localhost|[\w-]+(\.[\w-]+)+):\d{1,5}"
)


def repeat_list_flags(tokens: Iterable[str]) -> Sequence[str]:
    """Rewrite `--initial-peers A B` as `--initial-peers A --initial-peers B`.

    Only tokens that look like addresses belong to the list, so that a prompt may follow it.
    """
    spread: list[str] = []
    current: str | None = None
    count = 0
    for token in tokens:
        if current is not None and _PEER_ADDRESS_PATTERN.fullmatch(token):
            if count:
                spread.append(current)
            count += 1
        else:
            current, count = (token, 0) if token in _LIST_FLAGS else (None, 0)
        spread.append(token)
    return spread


_NUMBER_FLAGS = frozenset(
    {"--temperature", "--top-p", "--seed", "--max-new-tokens", "--threads", "--step-timeout-s"}
)
_NUMBER_PATTERN = re.compile(r"-[0-9.]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_OPTION_PATTERN = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*(=.*)?", re.DOTALL)


def separate_prompt(tokens: Sequence[str]) -> Sequence[str]:
    """Move prompts of `generate` that begin with a dash, such as `-5 degrees`, behind a `--`."""
    if not tokens or tokens[0] != "generate" or "--" in tokens:
        return tokens
    options: list[str] = []
    prompts: list[str] = []
    for before, token in zip(("", *tokens), tokens, strict=False):
        is_option = not token.startswith("-") or _OPTION_PATTERN.fullmatch(token)
        is_value = before in _NUMBER_FLAGS and _NUMBER_PATTERN.fullmatch(token)
        (options if is_option or is_value else prompts).append(token)
    return [*options, "--", *prompts] if prompts else tokens
