"""What a sender keeps of a session, to send it again to the replacement of a dead receiver.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from nesa_node.compression import tensors
from nesa_node.compression.codecs import RAW
from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.messages import RowSlice, Want

MERGED_TOKENS = 64
"""Neighbouring steps of up to so many tokens together are sent again as one: of a long generation
each token is a step of its own."""
MAX_FORGOTTEN = 1 / 4
"""The part of a step's bytes that no row holds any more, from which on the others are copied."""
MAX_EXCESS = 1 / 2
"""Steps are looked through for what no row holds once they have so much more bytes than rows hold.
So memory is bounded, and for each token that came or was cut a few steps are looked at."""
SMALL_BYTES = 64 * 1024
"""Of a step, up to which it is copied on the event loop."""


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


class Part(NamedTuple):
    """What a row holds of a kept step. Rows that are copies of each other share them."""

    number: int
    """Of the step in its outbox."""
    kept: Kept
    offset: int
    """Where its tokens begin in the step."""
    position: int
    tokens: int

    @property
    def end(self) -> int:
        return self.position + self.tokens

    def within(self, start: int, end: int) -> Part | None:
        """The tokens `start <= position < end`; None if there are none."""
        first, last = max(self.position, start), min(self.end, end)
        if first >= last:
            return None
        if last - first == self.tokens:
            return self
        offset = self.offset + first - self.position
        return Part(self.number, self.kept, offset, first, last - first)


@dataclass(frozen=True, slots=True)
class Held:
    """What rows hold of a kept step, or of neighbouring small ones. It is copied to be sent."""

    kept: Kept
    """The last of these steps."""
    parts: tuple[tuple[int, Part], ...]
    """With their rows; those of one row follow each other without a gap."""

    @classmethod
    def all_of(cls, kept: Kept, number: int = 0) -> Held:
        offsets = itertools.accumulate((part.count for part in kept.rows), initial=0)
        return cls(
            kept,
            tuple(
                (part.row, Part(number, kept, offset, part.position, part.count))
                for part, offset in zip(kept.rows, offsets, strict=False)
            ),
        )

    @property
    def rows(self) -> tuple[RowSlice, ...]:
        return tuple(
            RowSlice(row, parts[0].position, sum(part.tokens for part in parts))
            for row, parts in self._by_row().items()
        )

    def within(self, start: Sequence[int], end: Sequence[int]) -> Held | None:
        """The part within `start[row] <= position < end[row]`; None if nothing is."""
        cut = [(row, part.within(start[row], end[row])) for row, part in self.parts]
        left = tuple((row, part) for row, part in cut if part is not None)
        return Held(self.kept, left) if left else None

    async def copied(self) -> Kept:
        """A step of these tokens: the bytes of the kept one if it has no others, else a copy.

        A large copy is made in a thread.
        """
        kept = replace(self.kept, rows=self.rows)
        if self._is_whole():
            return kept
        if kept.want == "last" and self.parts[0][1].kept is not self.kept:
            # What is wanted is the last token of each step.
            kept = replace(kept, want="all")
        picks = [part for parts in self._by_row().values() for part in parts]
        copy = partial(_joined, kept, picks)
        if kept.meta.values_nbytes <= SMALL_BYTES:
            return copy()
        return await asyncio.to_thread(copy)

    def _by_row(self) -> dict[int, list[Part]]:
        rows: dict[int, list[Part]] = {}
        for row, part in self.parts:
            rows.setdefault(row, []).append(part)
        return rows

    def _is_whole(self) -> bool:
        """Whether these are all tokens of one step, in its order."""
        at = 0
        for _, part in self.parts:
            if part.kept is not self.kept or part.offset != at:
                return False
            at += part.tokens
        return at == self.kept.meta.shape[0]


class Outbox:
    """Sent steps in order. A rollback cuts them; what a receiver lacks can be read back.

    Peers can ask for thousands of changes with few bytes, so a change looks at no step that it does
    not cut: each row has a list of its parts.
    """

    def __init__(self) -> None:
        self._rows: list[list[Part]] = []
        self._tokens: list[int] = []
        """By row, how many its parts have."""
        self._number = 0
        self._token_bytes = 0
        self._stored_bytes = 0
        """Of all payloads, at most."""

    def append(self, kept: Kept) -> None:
        self._number += 1
        self._know_rows(1 + max(part.row for part in kept.rows))
        for row, part in Held.all_of(kept, self._number).parts:
            self._rows[row].append(part)
            self._tokens[row] += part.tokens
        self._token_bytes = _token_bytes(kept)
        self._stored_bytes += len(kept.payload)
        self._bound_memory()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget every token at or beyond `lengths[row]`."""
        for row, (parts, length) in enumerate(zip(self._rows, lengths, strict=False)):
            first = bisect_right(parts, length, key=_end)
            if first == len(parts):
                continue
            begun = parts[first].within(0, length)
            self._tokens[row] -= sum(part.tokens for part in parts[first:])
            del parts[first:]
            if begun is not None:
                parts.append(begun)
                self._tokens[row] += begun.tokens
        self._bound_memory()

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have been sent what row `sources[row]` was."""
        self._know_rows(len(sources))
        taken: set[int] = set()
        rows: list[list[Part]] = []
        for source in sources:
            parts = self._rows[source]
            rows.append(parts.copy() if source in taken else parts)
            taken.add(source)
        self._rows, self._tokens = rows, [self._tokens[source] for source in sources]
        self._bound_memory()

    def since(self, lengths: Sequence[int], until: Sequence[int]) -> Iterator[Held]:
        """Steps, or the parts of them, with tokens `lengths[row] <= position < until[row]`.

        Small neighbours come as one. What changes meanwhile is not seen.
        """
        ranges = zip(self._rows, lengths, until, strict=False)
        found = [_parts_of(row, *each) for row, each in enumerate(ranges)]
        return _merged(heapq.merge(*found, key=_number))

    def _know_rows(self, count: int) -> None:
        while len(self._rows) < count:
            self._rows.append([])
            self._tokens.append(0)

    def _bound_memory(self) -> None:
        """Forget what no row holds, if it may be much."""
        if self._stored_bytes <= sum(self._tokens) * self._token_bytes * (1 + MAX_EXCESS):
            return
        steps: dict[int, Kept] = {}
        held: dict[tuple[int, int], int] = {}
        """The most tokens that a row holds of a step from an offset on."""
        for part in itertools.chain(*self._rows):
            steps[part.number] = part.kept
            place = part.number, part.offset
            held[place] = max(held.get(place, 0), part.tokens)
        needed: Counter[int] = Counter()
        for (number, _), tokens in held.items():
            needed[number] += tokens * self._token_bytes
        copied: dict[int, dict[int, int]] = {
            number: {} for number, kept in steps.items() if _is_wasteful(kept, needed[number])
        }
        if copied:
            for (number, offset), tokens in held.items():
                if number in copied:
                    copied[number][offset] = tokens
            copies = {number: _picked(steps[number], counts) for number, counts in copied.items()}
            self._rows = [[_moved(part, copies) for part in parts] for parts in self._rows]
            steps |= {number: kept for number, (kept, _) in copies.items()}
        self._stored_bytes = sum(len(kept.payload) for kept in steps.values())


def _end(part: Part) -> int:
    return part.end


def _position(part: Part) -> int:
    return part.position


def _number(found: tuple[int, Part]) -> int:
    return found[1].number


def _parts_of(row: int, parts: list[Part], start: int, end: int) -> Iterator[tuple[int, Part]]:
    first, last = bisect_right(parts, start, key=_end), bisect_left(parts, end, key=_position)
    cut = (part.within(start, end) for part in parts[first:last])
    return ((row, part) for part in cut if part is not None)


def _merged(found: Iterator[tuple[int, Part]]) -> Iterator[Held]:
    """Parts in the order of their steps, as what is sent."""
    parts: list[tuple[int, Part]] = []
    ends: dict[int, int] = {}
    tokens = 0
    for _, group in itertools.groupby(found, key=_number):
        step = sorted(group, key=lambda each: each[1].offset)
        count = sum(part.tokens for _, part in step)
        follows = all(ends.get(row, part.position) == part.position for row, part in step)
        if parts and not (
            follows
            and tokens + count <= MERGED_TOKENS
            and _are_alike(parts[-1][1].kept, step[0][1].kept)
        ):
            yield Held(parts[-1][1].kept, tuple(parts))
            parts, ends, tokens = [], {}, 0
        parts += step
        ends |= {row: part.end for row, part in step}
        tokens += count
    if parts:
        yield Held(parts[-1][1].kept, tuple(parts))


def _are_alike(a: Kept, b: Kept) -> bool:
    """Whether two steps can be sent as one: compressed ones cannot be put together."""
    return a.meta.codec == b.meta.codec == RAW.text and (a.want, a.via) == (b.want, b.via)


def _is_wasteful(kept: Kept, needed_bytes: int) -> bool:
    return needed_bytes <= len(kept.payload) * (1 - MAX_FORGOTTEN)


def _picked(kept: Kept, counts: Mapping[int, int]) -> tuple[Kept, dict[int, int]]:
    """A copy of the tokens that are counted from each offset on, and their new offsets."""
    picks = [Part(0, kept, offset, 0, count) for offset, count in counts.items()]
    offsets = itertools.accumulate(counts.values(), initial=0)
    return _joined(kept, picks), dict(zip(counts, offsets, strict=False))


def _moved(part: Part, copies: Mapping[int, tuple[Kept, Mapping[int, int]]]) -> Part:
    if part.number not in copies:
        return part
    kept, offsets = copies[part.number]
    return part._replace(kept=kept, offset=offsets[part.offset])


def _joined(kept: Kept, picks: Sequence[Part]) -> Kept:
    """`kept` with the tokens of `picks`, not compressed again, which could change them."""
    token_bytes = _token_bytes(kept)
    plain: dict[int, memoryview] = {}
    for part in picks:
        if part.number not in plain:
            plain[part.number] = _plain(part.kept)
    payload = bytearray().join(
        plain[part.number][part.offset * token_bytes : (part.offset + part.tokens) * token_bytes]
        for part in picks
    )
    shape = (sum(part.tokens for part in picks), *kept.meta.shape[1:])
    return replace(kept, meta=TensorMeta(kept.meta.dtype, shape), payload=payload)


def _token_bytes(kept: Kept) -> int:
    """Of a token that is not compressed."""
    return kept.meta.values_nbytes // kept.meta.shape[0]


def _plain(kept: Kept) -> memoryview:
    if kept.meta.codec == RAW.text:
        return memoryview(kept.payload).cast("B")
    _, payload = tensors.encode(kept.tensor())
    return payload
