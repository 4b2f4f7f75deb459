"""Replay buffer of a session: sent steps, kept to be sent again to a failed receiver's replacement.

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
"""Tokens of consecutive steps that are replayed as one step: in decode each token is a step."""
MAX_FORGOTTEN = 1 / 4
"""Fraction of a step's bytes that no row refers to, from which on the used ones are copied out."""
MAX_EXCESS = 1 / 2
"""Excess of stored over referenced bytes, as a fraction, from which on unused bytes are searched
for: bounds memory at an amortized cost of a few steps per added or truncated token."""
SMALL_BYTES = 64 * 1024
"""Size of a step up to which it is copied on the event loop, not in a thread."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A step as it was sent: its tokens by row, and the encoded hidden states [T, D]."""

    step: int
    rows: tuple[RowSlice, ...]
    want: Want
    meta: TensorMeta
    payload: memoryview | bytearray
    via: tuple[str, ...] = ()
    """Codecs of the links that its input had passed."""

    def tensor(self) -> torch.Tensor:
        """Decode the hidden states [T, D]; they share memory with `payload`, do not modify them."""
        return tensors.decode(self.meta, self.payload, max_bytes=self.meta.most_nbytes)


class Part(NamedTuple):
    """Consecutive tokens of a row within a sent step; rows copied by a reorder share them."""

    number: int
    """Serial number of the step in its outbox."""
    kept: Kept
    offset: int
    """Index of its first token in the step."""
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
    """Tokens to replay, of one sent step or of consecutive small ones."""

    kept: Kept
    """The last of these steps."""
    parts: tuple[tuple[int, Part], ...]
    """(row, part) pairs; the parts of one row are contiguous."""

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
        """The tokens with `start[row] <= position < end[row]`; None if there are none."""
        cut = [(row, part.within(start[row], end[row])) for row, part in self.parts]
        left = tuple((row, part) for row, part in cut if part is not None)
        return Held(self.kept, left) if left else None

    async def copied(self) -> Kept:
        """Make a step of these tokens.

        It shares the bytes of the sent step if these are all its tokens, else they are copied, a
        large step's in a thread.
        """
        kept = replace(self.kept, rows=self.rows)
        if self._is_whole():
            return kept
        if kept.want == "last" and self.parts[0][1].kept is not self.kept:
            # The last token of each merged step is wanted, not only that of the last step.
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
    """Sent steps in order: truncated by rollbacks, and read to replay what a receiver lacks.

    Peers can request thousands of changes with few bytes, so each row has a list of its parts, and
    a change touches only the steps that it cuts.
    """

    def __init__(self) -> None:
        self._rows: list[list[Part]] = []
        self._tokens: list[int] = []
        """By row, the number of tokens in its parts."""
        self._number = 0
        self._token_bytes = 0
        self._stored_bytes = 0
        """Upper bound of the bytes of all payloads."""

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
        """Drop every token at or beyond `lengths[row]`."""
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
        """Replace each row by a copy of row `sources[row]`."""
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
        """Iterate over the tokens with `lengths[row] <= position < until[row]`, step by step.

        Small consecutive steps are merged. Changes made during the iteration have no effect on it.
        """
        ranges = zip(self._rows, lengths, until, strict=False)
        found = [_parts_of(row, *each) for row, each in enumerate(ranges)]
        return _merged(heapq.merge(*found, key=_number))

    def _know_rows(self, count: int) -> None:
        while len(self._rows) < count:
            self._rows.append([])
            self._tokens.append(0)

    def _bound_memory(self) -> None:
        """Free bytes that no row refers to, once they may exceed `MAX_EXCESS`."""
        if self._stored_bytes <= sum(self._tokens) * self._token_bytes * (1 + MAX_EXCESS):
            return
        steps: dict[int, Kept] = {}
        held: dict[tuple[int, int], int] = {}
        """By step and offset: the most tokens from there on that a row refers to."""
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
    """Merge parts, ordered by step, into the steps to replay."""
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
    """Whether two steps can be replayed as one; compressed payloads cannot be concatenated."""
    return a.meta.codec == b.meta.codec == RAW.text and (a.want, a.via) == (b.want, b.via)


def _is_wasteful(kept: Kept, needed_bytes: int) -> bool:
    return needed_bytes <= len(kept.payload) * (1 - MAX_FORGOTTEN)


def _picked(kept: Kept, counts: Mapping[int, int]) -> tuple[Kept, dict[int, int]]:
    """Copy `counts[offset]` tokens from each offset on; returns the copy and the new offsets."""
    picks = [Part(0, kept, offset, 0, count) for offset, count in counts.items()]
    offsets = itertools.accumulate(counts.values(), initial=0)
    return _joined(kept, picks), dict(zip(counts, offsets, strict=False))


def _moved(part: Part, copies: Mapping[int, tuple[Kept, Mapping[int, int]]]) -> Part:
    if part.number not in copies:
        return part
    kept, offsets = copies[part.number]
    return part._replace(kept=kept, offset=offsets[part.offset])


def _joined(kept: Kept, picks: Sequence[Part]) -> Kept:
    """Make a step like `kept` of the tokens of `picks`, uncompressed to keep their values."""
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
    """Bytes of one uncompressed token."""
    return kept.meta.values_nbytes // kept.meta.shape[0]


def _plain(kept: Kept) -> memoryview:
    if kept.meta.codec == RAW.text:
        return memoryview(kept.payload).cast("B")
    _, payload = tensors.encode(kept.tensor())
    return payload
