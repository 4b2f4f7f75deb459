"""Text of strangers as it may be shown: terminals obey some characters."""

from __future__ import annotations

_OBEYED = (
    *range(0x20),  # control characters, C0
    *range(0x7F, 0xA0),  # and C1
    *(0x2028, 0x2029),  # line separators
    *range(0x202A, 0x202F),  # what turns the direction of text around
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates
)
# A table: a function that is called for each character takes ten times as long.
_ESCAPES = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _OBEYED}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def plain_text(text: str) -> str:
    """`text` on one line, with each character that a terminal would obey written as its escape."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def plain_lines(text: str) -> str:
    """The same, but for line breaks and tabs, which stay."""
    return text if text.isprintable() else text.translate(_ESCAPES_IN_LINES)
