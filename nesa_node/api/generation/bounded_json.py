"""JSON encoding of values from requests, with a limit on its length."""

from __future__ import annotations

import json
from typing import Any

MAX_SCHEMA_BYTES = 64 * 1024
"""Limit on the JSON schemas of one grammar: compiling ten times as much takes a minute."""
WHITESPACE_RULES: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Options of llguidance: with free white space, small models write nothing else."""


def dump_bounded_json(value: Any, max_chars: int, *, compact: bool = False) -> str | None:
    """JSON of `value`, ASCII with spaces unless `compact`; None if it exceeds `max_chars`.

    `json.dumps` alone would hold the GIL until all of a large value is written. Raises `TypeError`,
    `ValueError` or `RecursionError` for values that JSON cannot represent.
    """
    if exceeds_json_chars(value, max_chars):
        return None
    text = json.dumps(
        value, ensure_ascii=not compact, separators=(",", ":") if compact else (", ", ": ")
    )
    return text if len(text) <= max_chars else None


def exceeds_json_chars(value: Any, max_chars: int) -> bool:
    """Whether JSON of `value` has more than `max_chars` characters, without spaces and escapes.

    A loop, since `iterencode` passes each part through all levels of nesting.
    """
    length, left = 0, [value]
    while left and length <= max_chars:
        part = left.pop()
        if isinstance(part, dict | list | tuple):
            length += 2 + max(len(part) - 1, 0)
            if length > max_chars:
                break
            if isinstance(part, dict):
                length += sum(3 + len(key) for key in part if isinstance(key, str))
                left.extend(part.values())
            else:
                left.extend(part)
        else:
            length += 2 + len(part) if isinstance(part, str) else 1
    return length > max_chars
