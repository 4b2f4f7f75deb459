"""Ids of responses."""

from __future__ import annotations

import secrets


def new_id(kind: str) -> str:
    """Unguessable id that begins with `kind`: `chatcmpl-…`, with 128 random bits."""
    return kind + secrets.token_hex(16)
