"""Batch of one iteration: tokens of several sessions' steps, packed for one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec

from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, StepBuffers
from nesa_node.swarm.protocol.messages import Step

P = ParamSpec("P")


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedStep(StepBuffers):
    """A queued step; `taken` of its packed tokens are already in iterations."""

    step: Step
    arrived_at: float
    scheduled_tokens: int = 0

    @property
    def remaining_tokens(self) -> int:
        return self.hidden.num_tokens - self.scheduled_tokens


@dataclass(slots=True)
class TokenChunk:
    """The packed tokens `start:end` of one row of a step."""

    buffers: QueuedStep
    row: int
    start: int
    end: int


@dataclass(slots=True)
class SessionBatch:
    """One session's part of an iteration."""

    chunks: list[TokenChunk]
    """Their tokens, chunk after chunk, are those of `runs`, run after run."""
    runs: list[RowChunk]
    completed_steps: list[QueuedStep]
    """Steps that this iteration completes."""
    error: Exception | None = field(default=None)
    """Why the part could not be run."""


def take_tokens(
    queue: Iterable[QueuedStep], tables: Sequence[PageTable], tokens: int
) -> SessionBatch:
    """Take the next `tokens` of consecutive queued steps into an iteration."""
    pieces: list[TokenChunk] = []
    done: list[QueuedStep] = []
    for pending in queue:
        count = min(tokens, pending.remaining_tokens)
        pieces += _take_chunks(pending, count)
        if not pending.remaining_tokens:
            done.append(pending)
        tokens -= count
        if not tokens:
            break
    if len(pieces) > 1:
        # The sort is stable: tokens of a row keep their order across steps.
        pieces.sort(key=lambda piece: piece.row)
    counts: dict[int, int] = {}
    for piece in pieces:
        counts[piece.row] = counts.get(piece.row, 0) + piece.end - piece.start
    runs = [RowChunk(tables[row], count) for row, count in counts.items()]
    return SessionBatch(_merge_adjacent(pieces), runs, done)


def run_batch(blocks: ModelBlocks, batches: Sequence[SessionBatch]) -> float:
    """Run an iteration on the device's thread and return its duration in seconds.

    Sets `error` for sessions that get no pages. If the forward fails, each remaining session runs
    alone, and those that fail again get `error`.
    """
    started = time.perf_counter()
    for share in batches:
        share.error = _error_of(_reserve_pages, share)
    ready = [share for share in batches if share.error is None]
    if len(ready) == 1:
        ready[0].error = _error_of(_run_forward, blocks, ready)
    elif ready and _error_of(_run_forward, blocks, ready) is not None:
        for share in ready:
            share.error = _error_of(_run_forward, blocks, [share])
    return time.perf_counter() - started


def _error_of(do: Callable[P, None], *args: P.args, **options: P.kwargs) -> Exception | None:
    try:
        do(*args, **options)
    except Exception as error:
        return error
    return None


def _reserve_pages(batch: SessionBatch) -> None:
    """Reserve pages for the runs. May copy shared pages, which takes too long for the event loop.

    `sleep(0)` lets a thread that waits for the pool's lock take it between runs.
    """
    for number, run in enumerate(batch.runs):
        if number:
            time.sleep(0)
        run.table.reserve(run.table.length + run.count)


def _run_forward(blocks: ModelBlocks, batches: Sequence[SessionBatch]) -> None:
    pieces = [piece for share in batches for piece in share.chunks]
    blocks.forward_buffers(pieces, [run for share in batches for run in share.runs])


def _take_chunks(step: QueuedStep, tokens: int) -> list[TokenChunk]:
    pieces: list[TokenChunk] = []
    start, end, at = step.scheduled_tokens, step.scheduled_tokens + tokens, 0
    for part in step.step.rows:
        first, last = max(at, start), min(at + part.count, end)
        if first < last:
            pieces.append(TokenChunk(step, part.row, first, last))
        at += part.count
    step.scheduled_tokens = end
    return pieces


def _merge_adjacent(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """Merge adjacent chunks of the same step; most steps become one chunk."""
    joined: list[TokenChunk] = []
    for piece in chunks:
        last = joined[-1] if joined else None
        if last is not None and last.buffers is piece.buffers and last.end == piece.start:
            last.end = piece.end
        else:
            joined.append(piece)
    return joined
