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
from operator import attrgetter
from typing import NamedTuple

import torch

from nesa_node.compression import tensors
from nesa_node.compression.codecs import RAW
from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.protocol.messages import RowSlice, Want

MAX_MERGED_TOKENS = 64
"""Tokens of consecutive steps that are replayed as one step: in decode each token is a step."""
MAX_UNUSED_FRACTION = 1 / 4
"""Fraction of a step's bytes that no row refers to, from which on the used ones are copied out."""
MAX_EXCESS_FRACTION = 1 / 2
"""Excess of stored over referenced bytes, as a fraction, from which on unused bytes are searched
for: bounds memory at an amortized cost of a few steps per added or truncated token."""
INLINE_COPY_BYTES = 64 * 1024
"""Size of a step up to which it is copied on the event loop, not in a thread."""


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step as it was sent: its tokens by row, and the encoded hidden states [T, D]."""

    step: int
    rows: tuple[RowSlice, ...]
    want: Want
    meta: TensorMeta
    payload: memoryview | bytearray
    via: tuple[str, ...] = ()
    """Codecs of the links that its input had passed."""

    def decode(self) -> torch.Tensor:
        """Decode the hidden states [T, D]; they share memory with `payload`, do not modify them."""
        return tensors.decode(self.meta, self.payload, max_bytes=self.meta.max_nbytes)


def last_positions(rows: Sequence[RowSlice]) -> tuple[RowSlice, ...]:
    """The last position of each of `rows`."""
    return tuple(RowSlice(part.row, part.position + part.count - 1, 1) for part in rows)


class RowSegment(NamedTuple):
    """Consecutive tokens of a row within a sent step; rows copied by a reorder share them."""

    serial: int
    """Serial number of the step in its outbox."""
    sent: SentStep
    offset: int
    """Index of its first token in the step."""
    position: int
    tokens: int

    @property
    def end(self) -> int:
        return self.position + self.tokens

    def clip(self, start: int, end: int) -> RowSegment | None:
        """The tokens `start <= position < end`; None if there are none."""
        first, last = max(self.position, start), min(self.end, end)
        if first >= last:
            return None
        if last - first == self.tokens:
            return self
        offset = self.offset + first - self.position
        return RowSegment(self.serial, self.sent, offset, first, last - first)


@dataclass(frozen=True, slots=True)
class ReplaySlice:
    """Tokens to replay, of one sent step or of consecutive small ones."""

    last_step: SentStep
    """The last of these steps."""
    segments: tuple[tuple[int, RowSegment], ...]
    """(row, part) pairs; the parts of one row are contiguous."""

    @classmethod
    def of_step(cls, sent: SentStep, serial: int = 0) -> ReplaySlice:
        offsets = itertools.accumulate((part.count for part in sent.rows), initial=0)
        return cls(
            sent,
            tuple(
                (part.row, RowSegment(serial, sent, offset, part.position, part.count))
                for part, offset in zip(sent.rows, offsets, strict=False)
            ),
        )

    @property
    def rows(self) -> tuple[RowSlice, ...]:
        return tuple(
            RowSlice(row, parts[0].position, sum(part.tokens for part in parts))
            for row, parts in self._segments_by_row().items()
        )

    def clip(self, start: Sequence[int], end: Sequence[int]) -> ReplaySlice | None:
        """The tokens with `start[row] <= position < end[row]`; None if there are none."""
        cut = [(row, part.clip(start[row], end[row])) for row, part in self.segments]
        left = tuple((row, part) for row, part in cut if part is not None)
        return ReplaySlice(self.last_step, left) if left else None

    async def materialize(self) -> SentStep:
        """Make a step of these tokens.

        It shares the bytes of the sent step if these are all its tokens, else they are copied, a
        large step's in a thread.
        """
        kept = replace(self.last_step, rows=self.rows)
        if self._is_whole_step():
            return kept
        if kept.want == "last" and self.segments[0][1].sent is not self.last_step:
            # The last token of each merged step is wanted, not only that of the last step.
            kept = replace(kept, want="all")
        picks = [part for parts in self._segments_by_row().values() for part in parts]
        copy = partial(_join_segments, kept, picks)
        if kept.meta.decoded_nbytes <= INLINE_COPY_BYTES:
            return copy()
        return await asyncio.to_thread(copy)

    def _segments_by_row(self) -> dict[int, list[RowSegment]]:
        rows: dict[int, list[RowSegment]] = {}
        for row, part in self.segments:
            rows.setdefault(row, []).append(part)
        return rows

    def _is_whole_step(self) -> bool:
        """Whether these are all tokens of one step, in its order."""
        at = 0
        for _, part in self.segments:
            if part.sent is not self.last_step or part.offset != at:
                return False
            at += part.tokens
        return at == self.last_step.meta.shape[0]


class ReplayBuffer:
    """Sent steps in order: truncated by rollbacks, and read to replay what a receiver lacks.

    Peers can request thousands of changes with few bytes, so each row has a list of its parts, and
    a change touches only the steps that it cuts.
    """

    def __init__(self) -> None:
        self._rows: list[list[RowSegment]] = []
        self._num_tokens: list[int] = []
        """By row, the number of tokens in its parts."""
        self._last_serial = 0
        self._token_bytes = 0
        self._stored_bytes = 0
        """Upper bound of the bytes of all payloads."""

    def append(self, sent: SentStep) -> None:
        self._last_serial += 1
        self._ensure_rows(1 + max(part.row for part in sent.rows))
        for row, part in ReplaySlice.of_step(sent, self._last_serial).segments:
            self._rows[row].append(part)
            self._num_tokens[row] += part.tokens
        self._token_bytes = _bytes_per_token(sent)
        self._stored_bytes += len(sent.payload)
        self._drop_unused()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop every token at or beyond `lengths[row]`."""
        for row, (parts, length) in enumerate(zip(self._rows, lengths, strict=False)):
            first = bisect_right(parts, length, key=attrgetter("end"))
            if first == len(parts):
                continue
            begun = parts[first].clip(0, length)
            self._num_tokens[row] -= sum(part.tokens for part in parts[first:])
            del parts[first:]
            if begun is not None:
                parts.append(begun)
                self._num_tokens[row] += begun.tokens
        self._drop_unused()

    def reorder(self, sources: Sequence[int]) -> None:
        """Replace each row by a copy of row `sources[row]`."""
        self._ensure_rows(len(sources))
        taken: set[int] = set()
        rows: list[list[RowSegment]] = []
        for source in sources:
            parts = self._rows[source]
            rows.append(parts.copy() if source in taken else parts)
            taken.add(source)
        self._rows, self._num_tokens = rows, [self._num_tokens[source] for source in sources]
        self._drop_unused()

    def iter_steps(self, lengths: Sequence[int], until: Sequence[int]) -> Iterator[ReplaySlice]:
        """Iterate over the tokens with `lengths[row] <= position < until[row]`, step by step.

        Small consecutive steps are merged. Changes made during the iteration have no effect on it.
        """
        ranges = zip(self._rows, lengths, until, strict=False)
        found = [_segments_between(row, *each) for row, each in enumerate(ranges)]
        return _merge_steps(heapq.merge(*found, key=_serial_of))

    def _ensure_rows(self, count: int) -> None:
        while len(self._rows) < count:
            self._rows.append([])
            self._num_tokens.append(0)

    def _drop_unused(self) -> None:
        """Free bytes that no row refers to, once they may exceed `MAX_EXCESS_FRACTION`."""
        if self._stored_bytes <= sum(self._num_tokens) * self._token_bytes * (
            1 + MAX_EXCESS_FRACTION
        ):
            return
        steps: dict[int, SentStep] = {}
        held: dict[tuple[int, int], int] = {}
        """By step and offset: the most tokens from there on that a row refers to."""
        for part in itertools.chain(*self._rows):
            steps[part.serial] = part.sent
            place = part.serial, part.offset
            held[place] = max(held.get(place, 0), part.tokens)
        needed: Counter[int] = Counter()
        for (number, _), tokens in held.items():
            needed[number] += tokens * self._token_bytes
        copied: dict[int, dict[int, int]] = {
            number: {} for number, kept in steps.items() if _should_copy(kept, needed[number])
        }
        if copied:
            for (number, offset), tokens in held.items():
                if number in copied:
                    copied[number][offset] = tokens
            copies = {
                number: _copy_tokens(steps[number], counts) for number, counts in copied.items()
            }
            self._rows = [[_relocate(part, copies) for part in parts] for parts in self._rows]
            steps |= {number: kept for number, (kept, _) in copies.items()}
        self._stored_bytes = sum(len(kept.payload) for kept in steps.values())


def _serial_of(found: tuple[int, RowSegment]) -> int:
    return found[1].serial


def _segments_between(
    row: int, parts: list[RowSegment], start: int, end: int
) -> Iterator[tuple[int, RowSegment]]:
    first = bisect_right(parts, start, key=attrgetter("end"))
    last = bisect_left(parts, end, key=attrgetter("position"))
    cut = (part.clip(start, end) for part in parts[first:last])
    return ((row, part) for part in cut if part is not None)


def _merge_steps(found: Iterator[tuple[int, RowSegment]]) -> Iterator[ReplaySlice]:
    parts: list[tuple[int, RowSegment]] = []
    ends: dict[int, int] = {}
    tokens = 0
    for _, group in itertools.groupby(found, key=_serial_of):
        step = sorted(group, key=lambda each: each[1].offset)
        count = sum(part.tokens for _, part in step)
        follows = all(ends.get(row, part.position) == part.position for row, part in step)
        if parts and not (
            follows
            and tokens + count <= MAX_MERGED_TOKENS
            and _can_merge(parts[-1][1].sent, step[0][1].sent)
        ):
            yield ReplaySlice(parts[-1][1].sent, tuple(parts))
            parts, ends, tokens = [], {}, 0
        parts += step
        ends |= {row: part.end for row, part in step}
        tokens += count
    if parts:
        yield ReplaySlice(parts[-1][1].sent, tuple(parts))


def _can_merge(a: SentStep, b: SentStep) -> bool:
    """Whether two steps can be replayed as one; compressed payloads cannot be concatenated."""
    return a.meta.codec == b.meta.codec == RAW.text and (a.want, a.via) == (b.want, b.via)


def _should_copy(kept: SentStep, needed_bytes: int) -> bool:
    return needed_bytes <= len(kept.payload) * (1 - MAX_UNUSED_FRACTION)


def _copy_tokens(kept: SentStep, counts: Mapping[int, int]) -> tuple[SentStep, dict[int, int]]:
    """Copy `counts[offset]` tokens from each offset on; returns the copy and the new offsets."""
    picks = [RowSegment(0, kept, offset, 0, count) for offset, count in counts.items()]
    offsets = itertools.accumulate(counts.values(), initial=0)
    return _join_segments(kept, picks), dict(zip(counts, offsets, strict=False))


def _relocate(
    part: RowSegment, copies: Mapping[int, tuple[SentStep, Mapping[int, int]]]
) -> RowSegment:
    if part.serial not in copies:
        return part
    kept, offsets = copies[part.serial]
    return part._replace(sent=kept, offset=offsets[part.offset])


def _join_segments(kept: SentStep, picks: Sequence[RowSegment]) -> SentStep:
    """Make a step like `kept` of the tokens of `picks`, uncompressed to keep their values."""
    token_bytes = _bytes_per_token(kept)
    plain: dict[int, memoryview] = {}
    for serial, sent in {part.serial: part.sent for part in picks}.items():
        if sent.meta.codec == RAW.text:
            plain[serial] = memoryview(sent.payload).cast("B")
        else:
            _, plain[serial] = tensors.encode(sent.decode())
    payload = bytearray().join(
        plain[part.serial][part.offset * token_bytes : (part.offset + part.tokens) * token_bytes]
        for part in picks
    )
    shape = (sum(part.tokens for part in picks), *kept.meta.shape[1:])
    return replace(kept, meta=TensorMeta(kept.meta.dtype, shape), payload=payload)


def _bytes_per_token(kept: SentStep) -> int:
    return kept.meta.decoded_nbytes // kept.meta.shape[0]
