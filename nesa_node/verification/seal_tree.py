"""Commitments to what a session's rows took in and gave out, one leaf for each position.

A leaf is a keyed hash of the decoded values [D] at a position, so that how they were cut into
steps, encoded or sent again changes nothing. The key is the session's secret: without it nothing
can be told about values, and the roots of two nodes of a star, which have different secrets, do not
match. Trees are truncated and copied as the rows' caches are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

HASH_BYTES = 32
ABSENT_LEAF = bytes(HASH_BYTES)
"""Leaf of a position whose values did not pass here: reused, handed over, or not asked for."""


class SealTree:
    """Merkle tree over leaves that are appended in order; inner nodes are hashed once.

    Its root is a hash of the number of leaves and of the roots of the complete subtrees.
    """

    def __init__(self) -> None:
        self._levels: list[list[bytes]] = [[]]

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, leaf: bytes) -> None:
        level = 0
        while True:
            nodes = self._levels[level]
            nodes.append(leaf)
            if len(nodes) % 2:
                return
            leaf = _hash(b"node", nodes[-2] + nodes[-1])
            level += 1
            if level == len(self._levels):
                self._levels.append([])

    def truncate(self, length: int) -> None:
        """Drop the leaves from `length` on."""
        for level, nodes in enumerate(self._levels):
            del nodes[length >> level :]

    def copy(self) -> SealTree:
        made = SealTree()
        made._levels = [nodes.copy() for nodes in self._levels]
        return made

    @property
    def root(self) -> bytes:
        tops = (nodes[-1] for nodes in self._levels if len(nodes) % 2)
        return _hash(b"root", len(self).to_bytes(8, "big") + b"".join(tops))


@dataclass(frozen=True, slots=True)
class RowRoots:
    """Roots over `length` positions of a row: of what came, and of what went."""

    length: int
    inputs: bytes
    outputs: bytes


class SessionSeals:
    """The trees of all rows of a session, inputs and outputs."""

    def __init__(self, secret: bytes, rows: int) -> None:
        self._key = hashlib.blake2b(b"nesa-node seal 1", key=secret, digest_size=32).digest()
        self._inputs = [SealTree() for _ in range(rows)]
        self._outputs = [SealTree() for _ in range(rows)]

    def add_inputs(self, row: int, position: int, values: bytes | memoryview, tokens: int) -> None:
        """Add the values of `tokens` positions from `position` on, [tokens, D] in little-endian
        bytes. Positions before them that have none are absent; those that have some keep theirs,
        since after a failover outputs are sent again.
        """
        self._add(self._inputs[row], position, values, tokens)

    def add_outputs(self, row: int, position: int, values: bytes | memoryview, tokens: int) -> None:
        """See `add_inputs`."""
        self._add(self._outputs[row], position, values, tokens)

    def _add(self, tree: SealTree, position: int, values: bytes | memoryview, tokens: int) -> None:
        _fill(tree, position)
        size = len(values) // tokens
        for at in range((len(tree) - position) * size, tokens * size, size):
            leaf = hashlib.blake2b(
                values[at : at + size], key=self._key, digest_size=HASH_BYTES, person=b"leaf"
            )
            tree.append(leaf.digest())

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop the positions from `lengths[row]` on."""
        for trees in (self._inputs, self._outputs):
            for tree, length in zip(trees, lengths, strict=True):
                tree.truncate(length)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have what row `sources[row]` has."""
        self._inputs = [self._inputs[source].copy() for source in sources]
        self._outputs = [self._outputs[source].copy() for source in sources]

    def roots(self) -> tuple[RowRoots, ...]:
        """Roots of each row; positions whose output did not go anywhere are absent."""
        for inputs, outputs in zip(self._inputs, self._outputs, strict=True):
            _fill(outputs, len(inputs))
        return tuple(
            RowRoots(len(inputs), inputs.root, outputs.root)
            for inputs, outputs in zip(self._inputs, self._outputs, strict=True)
        )


def _fill(tree: SealTree, length: int) -> None:
    while len(tree) < length:
        tree.append(ABSENT_LEAF)


def _hash(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES, person=kind).digest()
