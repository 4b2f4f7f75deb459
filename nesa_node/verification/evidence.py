"""Evidence against a node that needs no weights: two of its own seals that cannot both be true.

A seal states a session's rows at one time (`seal_tree.py`). An honest node draws a nonce for each
session and counts its seals. Rows only grow, but where the session is cut or reordered, which it
counts, too. So there are no two seals of one nonce

1. that differ in what stays the same for the whole session,
2. with one number, that are not equal,
3. of which the later one counts fewer cuts, or is of an earlier epoch,
4. with as many cuts, of which the later one has a shorter row, or one as long with other roots.

Seals of two nonces never contradict each other: what is computed twice is rounded twice. Nor do two
of one epoch because their roots differ: an epoch begins a moment before the rows are cut, and a
seal may fall between, which a hostile client can provoke.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from nesa_node.verification.seal_tree import RowRoots


@dataclass(frozen=True, slots=True)
class SealedState:
    """What a seal states, as far as another seal can contradict it."""

    nonce: bytes
    constants: Hashable
    """What stays the same for a session."""
    number: int
    epoch: int
    cuts: int | None
    """How often the rows were cut or reordered before; None: an older version does not count."""
    rows: tuple[RowRoots, ...]


def find_contradiction(one: SealedState, other: SealedState) -> str | None:
    """Why no honest node signs both; None: it may."""
    if one.nonce != other.nonce:
        return None
    if one.constants != other.constants or len(one.rows) != len(other.rows):
        return "two seals of one session are of different nodes, rows, blocks or computations"
    if one.number == other.number:
        return None if one == other else f"two seals with number {one.number} differ"
    first, second = sorted((one, other), key=lambda each: each.number)
    pair = f"seals {first.number} and {second.number} of a session"
    if first.epoch > second.epoch:
        return f"{pair} are of epochs {first.epoch} and {second.epoch}"
    if (first.cuts is None) != (second.cuts is None):
        return f"{pair} do not both count cuts"
    if first.cuts is None or second.cuts is None or first.cuts < second.cuts:
        return None
    if first.cuts > second.cuts:
        return f"{pair} count {first.cuts} and {second.cuts} cuts"
    for row, (before, after) in enumerate(zip(first.rows, second.rows, strict=True)):
        if after.length < before.length:
            return f"{pair} have {before.length} and {after.length} tokens of row {row}, uncut"
        if after.length == before.length and after != before:
            return f"{pair} are of different values in the {after.length} tokens of row {row}"
    return None
