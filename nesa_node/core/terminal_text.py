"""Escaping of untrusted text for terminals, which execute control characters."""

from __future__ import annotations

_CONTROL_CODES = (
    *range(0x20),  # control characters, C0
    *range(0x7F, 0xA0),  # and C1
    *(0x2028, 0x2029),  # line separators
    *range(0x202A, 0x202F),  # bidirectional overrides
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates
)
# `str.translate` with a table is ten times as fast as a function per character.
_ESCAPES = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _CONTROL_CODES}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def escape_text(text: str) -> str:
    """`text` on one line, with control characters, also line breaks and tabs, as escapes."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def escape_lines(text: str) -> str:
    """`text` with control characters as escapes; line breaks and tabs are kept."""
    return text if text.isprintable() else text.translate(_ESCAPES_IN_LINES)
