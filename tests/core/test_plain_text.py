"""What is shown of what strangers wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.plain_text import plain_lines, plain_text

EVIL = "\x1b[2J\x1b[H\x1b]52;c;cm0gLXJmIH4=\x07 run this\r\nthat\u202e\x9b1m"


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    shown = plain_text(EVIL)
    assert shown.isprintable()
    assert shown.startswith("\\x1b[2J\\x1b[H\\x1b]52;c;")
    assert shown.endswith("run this\\r\\nthat\\u202e\\x9b1m")
    assert plain_lines("a\n\tb\rc\x1b") == "a\n\tb\\rc\\x1b"


@pytest.mark.parametrize("text", ["", "plain", "naïve — 東京 🙂", "क्‍ष", "می‌خواهم", "👩‍💻"])
def test_words_of_all_languages_stay(text: str) -> None:
    assert plain_text(text) == plain_lines(text) == text


@given(st.text())
def test_nothing_shown_is_a_control_character(text: str) -> None:
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in plain_text(text))
