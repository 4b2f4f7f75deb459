"""JSON of what a request brought, up to a bound."""

from __future__ import annotations

import json
from typing import Any


def bounded_json(value: Any, most: int, *, compact: bool = False) -> str | None:
    """JSON of `value`, in ASCII with spaces between parts unless `compact`; None: more than `most`.

    `json.dumps` writes all of it before its length is known, and other threads stop meanwhile.
    Raises `TypeError`, `ValueError` or `RecursionError` for what is no JSON.
    """
    encoder = json.JSONEncoder(
        ensure_ascii=not compact, separators=(",", ":") if compact else (", ", ": ")
    )
    parts, length = [], 0
    for part in encoder.iterencode(value):
        length += len(part)
        if length > most:
            return None
        parts.append(part)
    return "".join(parts)
