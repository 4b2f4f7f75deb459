"""Where a request for further tokens goes on from what nodes have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nesa_node.client.graphs.decoder_sequence import DecoderSequence


def tokens(*rows: str) -> Tensor:
    return torch.tensor([[ord(letter) for letter in row] for row in rows])


def ask(sequence: DecoderSequence, rows: tuple[str, ...], sources: str) -> None:
    sequence.go_on(tokens(*rows), list(sources))
    sequence.record(tokens(*rows), list(sources))


@pytest.fixture
def sequence() -> DecoderSequence:
    made = DecoderSequence()
    ask(made, ("ab", "cd"), "xy")
    assert made.position == 0
    return made


def test_each_row_goes_on(sequence: DecoderSequence) -> None:
    key = sequence.message.key
    ask(sequence, ("abc", "cde"), "xy")
    assert (sequence.position, list(sequence.message.rows)) == (2, [])
    ask(sequence, ("abcde", "cdefg"), "xy")
    assert (sequence.position, list(sequence.message.rows)) == (3, [])
    assert sequence.message.key == key


def test_rows_go_on_from_another_one(sequence: DecoderSequence) -> None:
    ask(sequence, ("cdb", "cda"), "yy")
    assert (sequence.position, list(sequence.message.rows)) == (2, [1, 1])
    ask(sequence, ("cdaa", "cdab", "cdba"), "yyy")
    assert (sequence.position, list(sequence.message.rows)) == (3, [1, 1, 0])


def test_the_same_tokens_of_two_sources(sequence: DecoderSequence) -> None:
    ask(sequence, ("ab", "ab", "ab"), "xyx")
    ask(sequence, ("abc", "abc", "abd"), "xyx")
    assert sequence.message.rows == (), "each from its own"
    ask(sequence, ("abce", "abcf", "abcg"), "yxy")
    assert (sequence.position, list(sequence.message.rows)) == (3, [1, 0, 1])


@pytest.mark.parametrize(
    ("rows", "sources"),
    [
        (("abc", "cee"), "xy"),
        (("abc", "cde"), "xx"),
        (("ab", "cd"), "xy"),
        (("a", "c"), "xy"),
    ],
)
def test_what_no_row_begins_with_begins_again(
    rows: tuple[str, ...], sources: str, sequence: DecoderSequence
) -> None:
    key = sequence.message.key
    ask(sequence, rows, sources)
    assert (sequence.position, list(sequence.message.rows)) == (0, [])
    assert sequence.message.key != key, "nodes may still work at the old one"


def test_a_lost_sequence_begins_again(sequence: DecoderSequence) -> None:
    key = sequence.message.key
    sequence.go_on(tokens("abc", "cde"), "xy")
    sequence.restart()
    assert (sequence.position, list(sequence.message.rows)) == (0, [])
    assert sequence.message.key != key
    sequence.record(tokens("abc", "cde"), "xy")
    ask(sequence, ("abcd", "cdef"), "xy")
    assert sequence.position == 3
