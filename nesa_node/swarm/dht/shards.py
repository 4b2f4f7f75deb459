"""Shards: the keys of a model whose records are too many for one key.

A small model has one key, the root (`records.py` `model_key`). A node whose root holds more than
`MAX_ROOT_RECORDS` writes its record to a shard instead: one of `NUM_RANGES` ranges of blocks, by
the middle of its span, times 2^(level - 1) buckets, by a hash of its peer id. Each node announces
the level that it uses and changes it by the number of records that the members of its own shard
report, so that a shard holds some hundred records however large the model becomes.

One bucket of all ranges, a *column*, is a sample of the whole model, with holders of each block; a
reader uses the column of its own peer id, and further shards only for blocks with few holders:
first those of its bucket one level up and down, then the root and other buckets.

A column's worth of nodes stays under the root, which readers begin with, and in the index of all
nodes; so does each node whose shard has few records or says nothing of their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TypeVar

from nesa_node.core.ids import ModelId, PeerId, Span

NUM_RANGES = 4
"""Ranges of blocks of equal width. A reader looks up one shard of each."""
MAX_LEVEL = 13
"""At most 16,384 shards of a model: 4 million nodes."""
MAX_ROOT_RECORDS = 1024
"""Records under the root beyond which nodes go to shards: as many as a reader remembers."""
MAX_SHARD_RECORDS = 256
"""Records under a shard beyond which its nodes go up a level, where each has half as many."""
MIN_SHARD_RECORDS = 64
"""Records under a shard below which its nodes go down a level; a quarter of the maximum, so that
neither a split nor a merge causes the other."""
MIN_HOLDERS = 8
"""Known holders of each block below which a reader reads the root and further shards."""
_BUCKET_BITS = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of a model: level from 1, range of blocks, bucket below 2^(level - 1)."""

    level: int
    block_range: int
    bucket: int

    def key(self, model_id: ModelId) -> str:
        """DHT key of the shard's records. Numbers come first, since a model id may be any text."""
        return f"nesa/1/shard/{self.level}/{self.block_range}/{self.bucket}/{model_id}"


def find_block_range(span: Span, num_blocks: int) -> int:
    """The range of blocks in which the middle of `span` lies."""
    return (span.start + span.end) * NUM_RANGES // (2 * num_blocks)


def find_bucket(peer: PeerId, level: int) -> int:
    """The bucket of `peer` among those of `level`, at least 1; half of it one level further up."""
    return _hash(peer) >> (_BUCKET_BITS - (level - 1))


def find_shard(peer: PeerId, span: Span, num_blocks: int, level: int) -> Shard:
    """The only shard that may hold a record of `peer` that announces `level`, at least 1."""
    return Shard(level, find_block_range(span, num_blocks), find_bucket(peer, level))


def is_root_sample(peer: PeerId, level: int) -> bool:
    """Whether a node of `level` keeps its record under the root, by other bits than its bucket: as
    many nodes of each range as one of its shards has."""
    return _hash(PeerId(f"root/{peer}")) >> (_BUCKET_BITS - (level - 1)) == 0


def choose_level(
    level: int, num_records: int | None, *, range_level: int = 0, highest_level: int = 0
) -> int:
    """The level of a node's next record, after its members reported `num_records`, if any did.

    Of the levels that are known of other nodes, `range_level` is that of the same range, if it is
    known of enough nodes for a shard: a node goes up to it from a shard with few records.
    `highest_level` is that of any range: while one has more than one shard, none goes back to the
    root, which all readers would then have to read.
    """
    if num_records is None:
        return level
    if num_records > (MAX_SHARD_RECORDS if level else MAX_ROOT_RECORDS):
        return min(level + 1, MAX_LEVEL)
    if level == 0 or num_records >= MIN_SHARD_RECORDS:
        return level
    if range_level > level:
        return range_level
    return level - 1 if level > 1 or highest_level <= 1 else level


class ShardWriter:
    """Level of a node's next record, and whether the root and the index have it, too."""

    def __init__(self) -> None:
        self.level = 0
        self._num_records: int | None = None

    def adopt(self, level: int) -> None:
        """Begin with the `level` of other nodes; a no-op once this node has counts of its own."""
        if self.level == 0 and self._num_records is None:
            self.level = level

    def is_listed(self, peer: PeerId) -> bool:
        """Whether a record of `peer` in a shard belongs under the root, too.

        It does if it is of the root's sample, or if few records are known to be in its shard: there
        may be no reader of that.
        """
        is_sparse = self._num_records is None or self._num_records < MIN_SHARD_RECORDS
        return is_sparse or is_root_sample(peer, self.level)

    def record_stored(
        self, num_records: int | None, range_level: int = 0, num_known: int = 0, highest: int = 0
    ) -> None:
        """Note that the members of this node's key have stored its record, one of `num_records`.

        The other levels are those of `choose_level`; `num_known` nodes are known of the range.
        """
        before = self.level
        self.level = choose_level(
            before,
            num_records,
            range_level=range_level if num_known > MIN_SHARD_RECORDS else 0,
            highest_level=highest,
        )
        self._num_records = num_records
        if num_records is not None and self.level > before:
            self._num_records = num_records // (2 if before else NUM_RANGES)

    def record_refused(self, num_records: int | None) -> None:
        """Note that the members of this node's shard refuse it: with `num_records`, since there are
        too many, else since they are of an earlier version."""
        is_full = num_records is not None and num_records > MAX_SHARD_RECORDS
        self.level = min(self.level + 1, MAX_LEVEL) if is_full else self.level - 1
        self._num_records = None


def median_levels(announced: Iterable[tuple[Span, int, int]]) -> tuple[int, ...]:
    """The level of each range of blocks by the median of what records announce, the lower of two.

    `announced` has span, number of blocks and level of each record; a range without any has the
    highest level of all.
    """
    levels: list[list[int]] = [[] for _ in range(NUM_RANGES)]
    for span, num_blocks, level in announced:
        levels[find_block_range(span, num_blocks)].append(level)
    medians = [sorted(known)[(len(known) - 1) // 2] if known else None for known in levels]
    highest = max((median for median in medians if median is not None), default=0)
    return tuple(highest if median is None else median for median in medians)


def column_shards(peer: PeerId, levels: Sequence[int]) -> list[Shard]:
    """The column of `peer`: one shard of each range that has any."""
    return [
        Shard(level, index, find_bucket(peer, level)) for index, level in enumerate(levels) if level
    ]


def adjacent_shards(peer: PeerId, levels: Sequence[int], ranges: Iterable[int]) -> list[Shard]:
    """The shards of `peer` one level up and down in each of `ranges`: some buckets of a range may
    have been split, or not yet, where most have not, or have."""
    return [
        Shard(level, index, find_bucket(peer, level))
        for index in ranges
        for level in (levels[index] + 1, levels[index] - 1)
        if levels[index] and 1 <= level <= MAX_LEVEL
    ]


def further_shards(
    peer: PeerId, levels: Sequence[int], ranges: Iterable[int], turn: int, limit: int
) -> list[Shard]:
    """At most `limit` shards of `ranges` beside the column of `peer`, the next ones each `turn`."""
    shards = []
    for index in ranges:
        others = 2 ** (levels[index] - 1) - 1 if levels[index] else 0
        own = find_bucket(peer, levels[index]) if others else 0
        steps = {(turn * limit + step) % others + 1 for step in range(min(limit, others))}
        shards.append([Shard(levels[index], index, own ^ step) for step in sorted(steps)])
    return interleave(shards)[:limit]


_Item = TypeVar("_Item")
_MISSING = object()


def interleave(lists: Iterable[Iterable[_Item]]) -> list[_Item]:
    """All first items, then all second ones, and so on: no list takes the first places alone."""
    rows = zip_longest(*lists, fillvalue=_MISSING)
    return [item for item in chain.from_iterable(rows) if item is not _MISSING]  # type: ignore[misc]


def even_sample(
    nodes: Sequence[tuple[PeerId, Span]], peer: PeerId, levels: Sequence[int], num_blocks: int
) -> list[bool]:
    """Which of `nodes` a planner may count: the same share of the nodes of each range.

    Ranges with more nodes have a higher level, so that a column has a smaller share of them: a
    planner that counts holders would send further nodes there. The bucket of `peer` at the highest
    level is an equal share of all ranges; other nodes count only for blocks with less than
    `MIN_HOLDERS` holders otherwise.
    """
    level = max(levels)
    if level == 0:
        return [True] * len(nodes)
    own = find_bucket(peer, level)
    kept = [find_bucket(node, level) == own for node, _ in nodes]
    holders = [0] * num_blocks
    for is_kept, (_, span) in zip(kept, nodes, strict=True):
        for block in range(span.start, span.end) if is_kept else ():
            holders[block] += 1
    for index, (_, span) in enumerate(nodes):
        if not kept[index] and min(holders[span.start : span.end]) < MIN_HOLDERS:
            kept[index] = True
            for block in range(span.start, span.end):
                holders[block] += 1
    return kept


def _hash(peer: PeerId) -> int:
    digest = hashlib.sha256(f"nesa/1/shard/{peer}".encode()).digest()
    return int.from_bytes(digest[: _BUCKET_BITS // 8], "big")
