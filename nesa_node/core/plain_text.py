"""Text of strangers as it may be shown: terminals obey some characters."""

from __future__ import annotations

import re

# Control characters (C0, C1), line separators, and what turns the direction of text around.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OBEYED_IN_LINES = re.compile(_OBEYED.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def plain_text(text: str) -> str:
    """`text` on one line, with each character that a terminal would obey written as its escape."""
    return text if text.isprintable() else _OBEYED.sub(_escaped, text)


def plain_lines(text: str) -> str:
    """The same, but for line breaks and tabs, which stay."""
    return text if text.isprintable() else _OBEYED_IN_LINES.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
