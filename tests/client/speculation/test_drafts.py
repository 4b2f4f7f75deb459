"""Lookup goes on as the text did before."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from nesa_node.client.speculation.drafts import LOOKUP_NGRAMS, DraftKind, LookupDrafter


def drafted(text: list[int], count: int = 4) -> list[int]:
    drafter = LookupDrafter()
    drafter.append(text)
    return [token for token, _ in islice(drafter.draft(), count)]


def test_what_followed_the_last_tokens_is_drafted() -> None:
    assert drafted([1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9, 1]


def test_nothing_is_drafted_after_new_tokens() -> None:
    assert drafted([]) == []
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1, 2, 3, 2]) == []


def test_the_latest_place_counts_and_the_longest_match_first() -> None:
    assert drafted([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]
    assert drafted([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1) == [5]


def test_a_loop_is_gone_on_with_beyond_the_text() -> None:
    assert drafted([8, 9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_the_level_tells_how_long_the_match_is_and_rises_along_a_draft() -> None:
    drafter = LookupDrafter()
    drafter.append([4, 1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3])
    kinds = [kind for _, kind in islice(drafter.draft(), 6)]
    assert kinds == [DraftKind("lookup", n.bit_length()) for n in (3, 4, 5, 6, 7, 8)]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_it_agrees_with_a_search_through_the_whole_text(text: list[int], pieces: int) -> None:
    """Also where the text came in pieces."""
    drafter = LookupDrafter()
    for start in range(0, len(text), pieces):
        drafter.append(text[start : start + pieces])
    found = next((token for token, _ in drafter.draft()), None)
    assert found == searched(text)


def searched(text: list[int]) -> int | None:
    for length in LOOKUP_NGRAMS:
        for end in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[end - length : end] == text[-length:]:
                return text[end]
    return None
