"""A long step as chunks that follow each other through the hops, so that all of them work at once.

T packed tokens, D hidden.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nesa_node.client.sessions import RowSlice, Want

CHUNK_TOKENS = 128
"""The smallest chunk: below this a machine computes less per second."""
LARGEST_CHUNK_TOKENS = 512
_CHUNKS_PER_HOP = 12
"""While chunks fill and leave a pipeline, each hop idles for as many of them as there are other
hops: with so many for each of those, it idles for less than a twelfth of the time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a step, and what is asked for them."""

    rows: tuple[RowSlice, ...]
    start: int
    end: int
    want: Want
    goes_on: bool
    """The last slice is not at its end here: its last token in this chunk is not asked for."""

    def wanted(self, output_TD: torch.Tensor) -> torch.Tensor:
        """The part of this chunk's output that belongs to the step's."""
        return output_TD[:-1] if self.goes_on and self.want == "last" else output_TD


def cut(
    rows: Sequence[RowSlice], want: Want, hops: int, chunk_tokens: int | None = None
) -> list[Chunk]:
    """Consecutive chunks of nearly equal size, which may end and begin within a row.

    They have `chunk_tokens` at most. Without it, steps of up to `CHUNK_TOKENS` tokens stay whole,
    and so do those with one token for each row.
    """
    total = sum(part.count for part in rows)
    if chunk_tokens is None and (total <= CHUNK_TOKENS or total == len(rows)):
        return [Chunk(tuple(rows), 0, total, want, False)]
    count = math.ceil(total / (chunk_tokens or _chunk_tokens(total, hops)))
    left = deque(rows)
    ends = [total * number // count for number in range(count + 1)]
    return [_take(left, start, end, want) for start, end in itertools.pairwise(ends)]


def _chunk_tokens(total: int, hops: int) -> int:
    enough = _CHUNKS_PER_HOP * (hops - 1)
    largest = LARGEST_CHUNK_TOKENS if enough == 0 else math.ceil(total / enough)
    return min(max(largest, CHUNK_TOKENS), LARGEST_CHUNK_TOKENS)


def _take(left: deque[RowSlice], start: int, end: int, want: Want) -> Chunk:
    taken: list[RowSlice] = []
    room = end - start
    goes_on = False
    while room:
        part = left.popleft()
        count = min(part.count, room)
        goes_on = count < part.count
        taken.append(RowSlice(part.row, part.position, count))
        if goes_on:
            left.appendleft(RowSlice(part.row, part.position + count, part.count - count))
        room -= count
    if want == "last" and goes_on and len(taken) == 1:
        want = "none"
    return Chunk(tuple(taken), start, end, want, goes_on)
