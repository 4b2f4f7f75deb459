"""Split of a long step into chunks, so that all hops of a chain compute at the same time.

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
"""Smallest chunk, in tokens: smaller ones lower a machine's throughput."""
LARGEST_CHUNK_TOKENS = 512
_CHUNKS_PER_HOP = 12
"""Chunks per hop after the first. While chunks fill and drain the pipeline, each hop idles for as
many chunks as there are further hops: with 12 times as many chunks, for under 1/12 of the time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a step, and which of their outputs are requested."""

    rows: tuple[RowSlice, ...]
    start: int
    end: int
    want: Want
    goes_on: bool
    """Whether the last slice continues in the next chunk: its last token here is not an output of
    the step."""

    def wanted(self, output_TD: torch.Tensor) -> torch.Tensor:
        """Rows of this chunk's output that belong to the step's output."""
        return output_TD[:-1] if self.goes_on and self.want == "last" else output_TD


def cut(
    rows: Sequence[RowSlice], want: Want, hops: int, chunk_tokens: int | None = None
) -> list[Chunk]:
    """Split `rows` into consecutive chunks of nearly equal size, which may end within a row.

    Chunks have at most `chunk_tokens` tokens. If that is None, steps of up to `CHUNK_TOKENS` tokens
    and decode steps (one token per row) stay whole.
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
