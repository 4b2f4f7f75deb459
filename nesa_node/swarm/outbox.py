"""What a sender keeps of a session, to send it again to the replacement of a dead receiver.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.messages import RowSlice, Want

MAX_FORGOTTEN = 1 / 4
"""The part of a step's bytes that no row holds any more, from which on the others are copied. So
memory is at most a third more than what rows hold, and for each token that was computed at most
three are copied."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One step as it was sent: its tokens by row, and the encoded hidden states [T, D]."""

    step: int
    rows: tuple[RowSlice, ...]
    want: Want
    meta: TensorMeta
    payload: memoryview | bytearray
    via: tuple[str, ...] = ()
    """How what it was computed from had travelled."""

    def tensor(self) -> torch.Tensor:
        """The hidden states [T, D]; shares memory with `payload`, do not write to it."""
        return tensors.decode(self.meta, self.payload, max_bytes=self.meta.most_nbytes)


@dataclass(frozen=True, slots=True)
class Held:
    """What rows hold of a kept step. Several may share its tokens: they are copied to be sent."""

    kept: Kept
    rows: tuple[RowSlice, ...]
    offsets: tuple[int, ...]
    """Where each row's tokens begin in the step."""

    @classmethod
    def all_of(cls, kept: Kept) -> Held:
        counts = (part.count for part in kept.rows[:-1])
        return cls(kept, kept.rows, tuple(itertools.accumulate(counts, initial=0)))

    def within(self, start: Sequence[int], end: Sequence[int]) -> Held | None:
        """The part within `start[row] <= position < end[row]`; None if nothing is.

        A step that lies within is returned as it is.
        """
        if _lie_within(self.rows, start, end):
            return self
        rows: list[RowSlice] = []
        offsets: list[int] = []
        for part, offset in zip(self.rows, self.offsets, strict=True):
            first = max(part.position, start[part.row])
            last = min(part.position + part.count, end[part.row])
            if first < last:
                rows.append(RowSlice(part.row, first, last - first))
                offsets.append(offset + first - part.position)
        return Held(self.kept, tuple(rows), tuple(offsets)) if rows else None

    def reordered(self, sources: Sequence[int]) -> Held | None:
        """What the rows hold once each is a copy of row `sources[row]`; None if nothing."""
        places = {part.row: (part, at) for part, at in zip(self.rows, self.offsets, strict=True)}
        found = [(row, *places[source]) for row, source in enumerate(sources) if source in places]
        rows = tuple(RowSlice(row, part.position, part.count) for row, part, _ in found)
        return Held(self.kept, rows, tuple(at for *_, at in found)) if rows else None

    def compacted(self) -> Held:
        """The same, in memory of its own if a quarter of the step's bytes is held by no row."""
        counts: dict[int, int] = {}
        for part, offset in zip(self.rows, self.offsets, strict=True):
            counts[offset] = max(counts.get(offset, 0), part.count)
        tokens, values = self.kept.meta.shape[0], self.kept.meta.values_nbytes
        needed = sum(counts.values()) * values // tokens
        if needed > len(self.kept.payload) * (1 - MAX_FORGOTTEN):
            return self
        is_shared = len(counts) < len(self.rows)
        kept = _picked(self.kept, () if is_shared else self.rows, counts.items())
        moved = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
        return Held(kept, self.rows, tuple(moved[offset] for offset in self.offsets))

    async def copied(self) -> Kept:
        """A step of these rows: the kept one if it is that, else a copy, made in a thread."""
        if self.rows is self.kept.rows:
            return self.kept
        picks = [(at, part.count) for part, at in zip(self.rows, self.offsets, strict=True)]
        return await asyncio.to_thread(_picked, self.kept, self.rows, picks)


class Outbox:
    """Sent steps in order. A rollback cuts them; what a receiver lacks can be read back.

    Peers can ask for thousands of changes with few bytes: what these change is done with the next
    step, when steps are read back, or once half of the tokens are forgotten.
    """

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._ends: list[int] = []
        """By row, the position after the last token."""
        self._sources: list[int] | None = None
        """By row, the row of the steps that it is to be a copy of."""
        self._forgotten = 0
        """Tokens that rows had beyond `_ends`."""

    def append(self, kept: Kept) -> None:
        self._settle()
        self._held.append(Held.all_of(kept))
        self._know_rows(1 + max(part.row for part in kept.rows))
        for part in kept.rows:
            self._ends[part.row] = part.position + part.count

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget every token at or beyond `lengths[row]`."""
        self._know_rows(len(lengths))
        before = sum(self._ends)
        self._ends = [min(pair) for pair in zip(self._ends, lengths, strict=True)]
        self._forgotten += before - sum(self._ends)
        if self._sources is None and self._forgotten >= sum(self._ends):
            # Else their memory would be beyond what rows were promised.
            self._settle()

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have been sent what row `sources[row]` was."""
        self._know_rows(len(sources))
        before = self._sources or range(len(sources))
        self._sources = [before[source] for source in sources]
        self._ends = [self._ends[source] for source in sources]

    def since(self, lengths: Sequence[int], until: Sequence[int]) -> Iterator[Held]:
        """Steps, or the parts of them, with tokens `lengths[row] <= position < until[row]`."""
        self._settle()
        beyond = sum(max(end - at, 0) for end, at in zip(self._ends, lengths, strict=False))
        for held in self._held[self._first_beyond(lengths, beyond) :]:
            part = held.within(lengths, until)
            if part is not None:
                yield part

    def _know_rows(self, count: int) -> None:
        self._ends += [0] * (count - len(self._ends))

    def _settle(self) -> None:
        """Do what cuts and reorders have left to do."""
        sources, self._sources = self._sources, None
        if sources == list(range(len(self._ends))):
            sources = None
        first = self._first_beyond(self._ends, self._forgotten) if sources is None else 0
        start = [0] * len(self._ends)
        changed: list[Held] = []
        for held in self._held[first:]:
            moved = held if sources is None else held.reordered(sources)
            left = moved and moved.within(start, self._ends)
            if left is not None:
                changed.append(left if left is held else left.compacted())
        self._held[first:] = changed
        self._forgotten = 0

    def _first_beyond(self, lengths: Sequence[int], tokens: int) -> int:
        """The index of the first step that holds tokens at or beyond `lengths[row]`.

        There are at most so many `tokens`; of rows that did not begin here at 0 there are fewer.
        """
        index = len(self._held)
        while tokens > 0 and index:
            index -= 1
            for part in self._held[index].rows:
                end = part.position + part.count
                tokens -= min(max(end - lengths[part.row], 0), part.count)
        return index


def _lie_within(rows: Sequence[RowSlice], start: Sequence[int], end: Sequence[int]) -> bool:
    # A loop: `all` takes three times as long.
    for part in rows:
        if part.position < start[part.row] or part.position + part.count > end[part.row]:
            return False
    return True


def _picked(kept: Kept, rows: tuple[RowSlice, ...], picks: Iterable[tuple[int, int]]) -> Kept:
    """A step of `rows`, whose tokens are those of `kept` at each (offset, count).

    They are not compressed again, which could change them.
    """
    tensor_TD = kept.tensor()
    parts_TD = torch.cat([tensor_TD[at : at + count] for at, count in picks])
    meta, payload = tensors.encode(parts_TD)
    return Kept(kept.step, rows, kept.want, meta, payload, kept.via)
