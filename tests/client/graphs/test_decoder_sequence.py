"""Where a request for further tokens goes on from what nodes have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nesa_node.client.graphs.decoder_sequence import DecoderSequence


def tokens(*rows: str) -> Tensor:
    return torch.tensor([[ord(letter) for letter in row] for row in rows])


def sources(names: str) -> list[Tensor]:
    return [torch.tensor([[ord(name), 0] for name in names])]


def ask(sequence: DecoderSequence, rows: tuple[str, ...], names: str) -> None:
    sequence.go_on(tokens(*rows), sources(names))
    sequence.record(tokens(*rows))


def key(sequence: DecoderSequence) -> bytes:
    assert sequence.message is not None
    return sequence.message.key


def state(sequence: DecoderSequence) -> tuple[int, list[int]]:
    assert sequence.message is not None
    return sequence.position, list(sequence.message.rows)


@pytest.fixture
def sequence() -> DecoderSequence:
    made = DecoderSequence()
    ask(made, ("ab", "cd"), "xy")
    assert made.position == 0
    made.values = {7: torch.zeros(1)}
    return made


def test_each_row_goes_on(sequence: DecoderSequence) -> None:
    first = key(sequence)
    ask(sequence, ("abc", "cde"), "xy")
    assert state(sequence) == (2, [])
    ask(sequence, ("abcde", "cdefg"), "xy")
    assert state(sequence) == (3, [])
    assert key(sequence) == first
    assert sequence.values


def test_rows_go_on_from_another_one() -> None:
    sequence = DecoderSequence()
    ask(sequence, ("ab", "cd"), "xx")
    ask(sequence, ("cdb", "cda"), "xx")
    assert state(sequence) == (2, [1, 1])
    ask(sequence, ("cdaa", "cdba"), "xx")
    assert state(sequence) == (3, [1, 0])


def test_the_same_tokens_of_two_sources() -> None:
    sequence = DecoderSequence()
    ask(sequence, ("ab", "cd", "ab", "cd"), "xxyy")
    ask(sequence, ("cda", "abd", "cda", "abc"), "xxyy")
    assert state(sequence) == (2, [1, 0, 3, 2])
    ask(sequence, ("cdaa", "cdab", "cdaa", "abce"), "xxyy")
    assert state(sequence) == (3, [0, 0, 2, 3])


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (("abc", "cee"), "xy"),
        (("cda", "abc"), "xy"),
        (("abc", "cde"), "xx"),
        (("abc", "cde"), "yx"),
        (("abc", "cde", "cdf"), "xyy"),
        (("ab", "cd"), "xy"),
        (("a", "c"), "xy"),
    ],
)
def test_what_no_row_begins_with_begins_again(
    rows: tuple[str, ...], names: str, sequence: DecoderSequence
) -> None:
    first = key(sequence)
    ask(sequence, rows, names)
    assert state(sequence) == (0, [])
    assert key(sequence) != first, "nodes may still work at the old one"
    assert bool(sequence.values) == (names == "xy"), "of other inputs they are other ones"


def test_a_lost_sequence_begins_again(sequence: DecoderSequence) -> None:
    first = key(sequence)
    sequence.go_on(tokens("abc", "cde"), sources("xy"))
    sequence.record_loss()
    assert state(sequence) == (0, [])
    assert key(sequence) != first
    sequence.record(tokens("abc", "cde"))
    ask(sequence, ("abcd", "cdef"), "xy")
    assert sequence.position == 3


def test_what_is_lost_again_and_again_is_not_kept(sequence: DecoderSequence) -> None:
    text = "abcdefgh"
    for length in (3, 4):
        assert sequence.message is not None
        sequence.go_on(tokens(text[:length], text[:length]), sources("xy"))
        sequence.record_loss()
        sequence.record(tokens(text[:length], text[:length]))
    assert sequence.message is None
    for length in (5, 6):
        ask(sequence, (text[:length], text[:length]), "xy")
        assert (sequence.position, sequence.message) == (0, None)
