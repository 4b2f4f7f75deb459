"""JSON of what a request brought, up to a bound."""

from __future__ import annotations

import json
from typing import Any


def bounded_json(value: Any, most: int, *, compact: bool = False) -> str | None:
    """JSON of `value`, in ASCII with spaces between parts unless `compact`; None: more than `most`.

    `json.dumps` writes all of it before its length is known, and other threads stop meanwhile.
    Raises `TypeError`, `ValueError` or `RecursionError` for what is no JSON.
    """
    if is_longer(value, most):
        return None
    text = json.dumps(
        value, ensure_ascii=not compact, separators=(",", ":") if compact else (", ", ": ")
    )
    return text if len(text) <= most else None


def is_longer(value: Any, most: int) -> bool:
    """Whether JSON of `value` has more than `most` characters at least, without spaces or escapes.

    In a loop: `iterencode` hands each part through all the levels in which it lies.
    """
    length, left = 0, [value]
    while left and length <= most:
        part = left.pop()
        if isinstance(part, dict | list | tuple):
            length += 2 + max(len(part) - 1, 0)
            if length > most:
                break
            if isinstance(part, dict):
                length += sum(3 + len(key) for key in part if isinstance(key, str))
                left.extend(part.values())
            else:
                left.extend(part)
        else:
            length += 2 + len(part) if isinstance(part, str) else 1
    return length > most
