"""Trees of a session's rows against ones built anew."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.verification.seal_tree import ABSENT_LEAF, SealTree, SessionSeals

KEY = b"k" * 32


def slow_root(leaves: list[bytes]) -> bytes:
    """The root by its definition: complete subtrees from the smallest, then their hash."""

    def top(part: list[bytes]) -> bytes:
        if len(part) == 1:
            return part[0]
        half = len(part) // 2
        joined = top(part[:half]) + top(part[half:])
        return hashlib.blake2b(joined, digest_size=32, person=b"node").digest()

    tops, end = [], len(leaves)
    for level in range(end.bit_length()):
        if len(leaves) >> level & 1:
            tops.append(top(leaves[end - (1 << level) : end]))
            end -= 1 << level
    data = len(leaves).to_bytes(8, "big") + b"".join(tops)
    return hashlib.blake2b(data, digest_size=32, person=b"root").digest()


def tree_of(leaves: list[bytes]) -> SealTree:
    tree = SealTree()
    for leaf in leaves:
        tree.append(leaf)
    return tree


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=40), st.data())
def test_a_tree_that_was_cut_and_grown_is_that_of_its_leaves(
    leaves: list[bytes], data: st.DataObject
) -> None:
    tree = tree_of(leaves)
    assert tree.root == slow_root(leaves)
    kept = data.draw(st.integers(0, len(leaves)))
    twin = tree.copy()
    tree.truncate(kept)
    more = data.draw(st.lists(st.binary(min_size=32, max_size=32), max_size=9))
    for leaf in more:
        tree.append(leaf)
    assert tree.root == slow_root(leaves[:kept] + more)
    assert twin.root == slow_root(leaves)


def test_how_values_are_cut_into_steps_changes_nothing() -> None:
    values = bytes(range(240))
    whole, pieces = SessionSeals(KEY, 1), SessionSeals(KEY, 1)
    whole.add_inputs(0, 0, values, 10)
    for start, end in ((0, 3), (3, 4), (4, 10)):
        pieces.add_inputs(0, start, memoryview(values)[24 * start : 24 * end], end - start)
    assert whole.roots() == pieces.roots()


def test_one_value_one_position_and_one_key_more_change_the_root() -> None:
    def root(values: bytes, position: int = 0, key: bytes = KEY) -> bytes:
        seals = SessionSeals(key, 1)
        seals.add_inputs(0, position, values, 2)
        return seals.roots()[0].inputs

    plain = root(b"abcd")
    assert len({plain, root(b"abce"), root(b"abcd", 1), root(b"abcd", key=b"x" * 32)}) == 4


def test_positions_without_values_are_absent() -> None:
    seals = SessionSeals(KEY, 2)
    seals.add_inputs(0, 3, b"abcd", 4)
    seals.add_outputs(0, 6, b"z", 1)
    (first, second) = seals.roots()
    assert (first.length, second.length) == (7, 0)
    leaf = hashlib.blake2b(
        b"z",
        key=hashlib.blake2b(b"nesa-node seal 1", key=KEY, digest_size=32).digest(),
        digest_size=32,
        person=b"leaf",
    ).digest()
    assert first.outputs == slow_root([ABSENT_LEAF] * 6 + [leaf])
    assert second.inputs == second.outputs == slow_root([])


def test_what_is_sent_again_is_sealed_once() -> None:
    """After a failover: else the next seal contradicts the one before, of the same length."""
    values = bytes(range(240))
    once, again = SessionSeals(KEY, 1), SessionSeals(KEY, 1)
    for seals in (once, again):
        seals.add_inputs(0, 0, values[:160], 20)
        seals.add_outputs(0, 0, values[:160], 20)
    sealed = once.roots()
    assert again.roots() == sealed
    again.add_outputs(0, 5, values[40:160], 15)
    assert again.roots() == sealed
    for seals in (once, again):
        seals.add_inputs(0, 20, values[160:], 10)
    once.add_outputs(0, 20, values[160:], 10)
    # The last two that were sent before, and what is new.
    again.add_outputs(0, 18, values[144:], 12)
    assert again.roots() == once.roots()


def test_rows_are_cut_and_copied_as_caches_are() -> None:
    seals = SessionSeals(KEY, 2)
    seals.add_inputs(0, 0, b"abc", 3)
    seals.add_inputs(1, 0, b"uvwx", 4)
    seals.truncate([2, 4])
    seals.reorder([0, 0])
    seals.add_inputs(1, 2, b"y", 1)
    expected = SessionSeals(KEY, 2)
    expected.add_inputs(0, 0, b"ab", 2)
    expected.add_inputs(1, 0, b"aby", 3)
    assert seals.roots() == expected.roots()


@pytest.mark.parametrize("rows", [1, 256])
def test_a_session_without_tokens_has_roots(rows: int) -> None:
    assert len(SessionSeals(KEY, rows).roots()) == rows
