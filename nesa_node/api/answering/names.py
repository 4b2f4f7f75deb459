"""Ids of answers."""

from __future__ import annotations

import secrets


def new_id(kind: str) -> str:
    """`chatcmpl-…`: nobody can guess it."""
    return kind + secrets.token_hex(16)
