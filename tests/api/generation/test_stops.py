"""Stop texts are found however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.api.generation.tokenization import StopTextFilter

_SMALL = st.text(alphabet="ab", max_size=12)


def through(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    finder = StopTextFilter(stops)
    said = []
    for piece in pieces:
        said.append(finder.append(piece))
        if finder.has_stopped:
            return said, True
    return [*said, finder.finish()], False


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
)
def test_text_ends_before_the_first_stop_that_is_complete(
    stops: list[str], pieces: list[str]
) -> None:
    text = "".join(pieces)
    said, found = through(stops, pieces)
    assert found == any(stop in text for stop in stops)
    if not found:
        assert "".join(said) == text
        return
    came = ""
    for piece in pieces:
        came += piece
        ends = [came.index(stop) for stop in stops if stop in came]
        if ends:
            assert "".join(said) == came[: min(ends)]
            return


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (["one", " END", " two"], ["one", " "]),
        (["one E", "N", "D"], ["one ", "", ""]),
        (["one E", "N", "E", "ND"], ["one ", "", "EN", ""]),
    ],
)
def test_what_may_become_a_stop_is_held_back_and_nothing_else(
    pieces: list[str], said: list[str]
) -> None:
    assert through(["END"], pieces) == (said, True)


def test_text_passes_where_there_are_no_stops() -> None:
    assert through([], ["a", "b"]) == (["a", "b", ""], False)
