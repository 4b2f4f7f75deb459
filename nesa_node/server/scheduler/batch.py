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
    """A queued step; `scheduled_tokens` of its packed tokens are already in iterations."""

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
    """Why it could not be run."""


def take_tokens(
    queue: Iterable[QueuedStep], tables: Sequence[PageTable], tokens: int
) -> SessionBatch:
    """Take the next `tokens` of consecutive queued steps into an iteration."""
    chunks: list[TokenChunk] = []
    completed: list[QueuedStep] = []
    for queued in queue:
        count = min(tokens, queued.remaining_tokens)
        chunks += _take_chunks(queued, count)
        if not queued.remaining_tokens:
            completed.append(queued)
        tokens -= count
        if not tokens:
            break
    if len(chunks) > 1:
        # The sort is stable: tokens of a row keep their order across steps.
        chunks.sort(key=lambda chunk: chunk.row)
    counts: dict[int, int] = {}
    for chunk in chunks:
        counts[chunk.row] = counts.get(chunk.row, 0) + chunk.end - chunk.start
    runs = [RowChunk(tables[row], count) for row, count in counts.items()]
    return SessionBatch(_merge_adjacent(chunks), runs, completed)


def run_batch(blocks: ModelBlocks, batches: Sequence[SessionBatch]) -> float:
    """Run an iteration on the device's thread and return its duration in seconds.

    Sets `error` for sessions that get no pages. If the forward fails, each remaining session runs
    alone, and those that fail again get `error`.
    """
    started = time.perf_counter()
    for batch in batches:
        batch.error = _error_of(_reserve_pages, batch)
    ready = [batch for batch in batches if batch.error is None]
    if len(ready) == 1:
        ready[0].error = _error_of(_run_forward, blocks, ready)
    elif ready and _error_of(_run_forward, blocks, ready) is not None:
        for batch in ready:
            batch.error = _error_of(_run_forward, blocks, [batch])
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
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    blocks.forward_buffers(chunks, [run for batch in batches for run in batch.runs])


def _take_chunks(step: QueuedStep, tokens: int) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    start, end, at = step.scheduled_tokens, step.scheduled_tokens + tokens, 0
    for row_slice in step.step.rows:
        first, last = max(at, start), min(at + row_slice.count, end)
        if first < last:
            chunks.append(TokenChunk(step, row_slice.row, first, last))
        at += row_slice.count
    step.scheduled_tokens = end
    return chunks


def _merge_adjacent(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """Merge adjacent chunks of the same step; most steps become one chunk."""
    merged: list[TokenChunk] = []
    for chunk in chunks:
        last = merged[-1] if merged else None
        if last is not None and last.buffers is chunk.buffers and last.end == chunk.start:
            last.end = chunk.end
        else:
            merged.append(chunk)
    return merged
