"""What is shown of what strangers wrote."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.logging import escape_lines, escape_text

EVIL = "\x1b[2J\x1b[H\x1b]52;c;cm0gLXJmIH4=\x07 run this\r\nthat\u202e\x9b1m"


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    shown = escape_text(EVIL)
    assert shown.isprintable()
    assert shown.startswith("\\x1b[2J\\x1b[H\\x1b]52;c;")
    assert shown.endswith("run this\\r\\nthat\\u202e\\x9b1m")
    assert escape_lines("a\n\tb\rc\x1b") == "a\n\tb\\rc\\x1b"


@pytest.mark.parametrize("text", ["", "plain", "naïve — 東京 🙂", "क्‍ष", "می‌خواهم", "👩‍💻"])
def test_words_of_all_languages_stay(text: str) -> None:
    assert escape_text(text) == escape_lines(text) == text


@given(st.text())
def test_nothing_shown_is_a_control_character(text: str) -> None:
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in escape_text(text))


OBEYED = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"


@given(st.text(st.one_of(st.characters(), st.from_regex(f"[{OBEYED}]", fullmatch=True))))
def test_only_what_a_terminal_obeys_is_escaped(text: str) -> None:
    in_lines = OBEYED.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f")
    for show, obeyed in ((escape_text, OBEYED), (escape_lines, in_lines)):
        escaped = re.sub(f"[{obeyed}]", lambda it: it[0].encode("unicode_escape").decode(), text)
        assert show(text) == escaped


def test_many_control_characters_cost_no_call_for_each() -> None:
    """A peer may send 2,048 in each message."""
    events = 0

    def count(*_: object) -> None:
        nonlocal events
        events += 1

    sys.setprofile(count)
    try:
        shown = escape_text("\x01" * 2048)
    finally:
        sys.setprofile(None)
    assert shown == "\\x01" * 2048
    assert events < 50
