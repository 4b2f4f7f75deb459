"""Batch of one iteration: number of microbatches, packed tokens, and the device's thread.

With two microbatches, the machines of a chain work at the same time, and so do nodes and clients.
With one, weights are read half as often. Which is faster depends on free processors and on token
cost, which a node cannot predict: both are tried.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import ParamSpec, TypeVar

from nesa_node.engine.adapters.served_adapter import ServedAdapter
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.kernels.threads import lower_priority
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, StepBuffers
from nesa_node.swarm.p2p.tasks import wait_until_done
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
    queue: Iterable[QueuedStep],
    tables: Sequence[PageTable],
    tokens: int,
    adapter: ServedAdapter | None = None,
) -> SessionBatch:
    """Take the next `tokens` of consecutive queued steps into an iteration, with `adapter`."""
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
    runs = [RowChunk(tables[row], count, adapter) for row, count in counts.items()]
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


MAX_MICROBATCHES = 2
MAX_UNGROUPED_SESSIONS = 2
"""At most this many sessions never wait for each other."""
WARMUP_STEPS = 2
"""Steps of each session that pass after a change before samples are taken."""
STEPS_PER_SAMPLE = 2
"""Steps of each session in one sample."""
SAMPLES_PER_TRIAL = 4
"""Samples of one number of microbatches before the numbers are compared or the other is tried."""
MIN_SAMPLES = 8
"""Samples of each number before they are compared: one step may take twice as long as the last."""
MAX_SAMPLES = 16
MAX_TRIAL_S = 10.0
"""A trial ends after this time even without samples, as under constant prefills."""
SAMPLES_VALID_S = 120.0
"""Samples of the unused number are trusted for this long; then some more are taken."""
MAX_STEP_GAP_S = 1.0
MIN_SPEEDUP = 1.03
"""The other number must be this many times as fast to be chosen."""
MAX_TRACKED_CONFIGURATIONS = 256


@dataclass(slots=True)
class _RateSamples:
    """Session steps per second measured with one number of microbatches."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    sampled_at: float = -math.inf

    @property
    def has_enough(self) -> bool:
        return len(self.rates) >= MIN_SAMPLES

    def expire(self, now: float) -> None:
        if now - self.sampled_at > SAMPLES_VALID_S:
            while len(self.rates) > MIN_SAMPLES - SAMPLES_PER_TRIAL:
                self.rates.popleft()


@dataclass(slots=True)
class _MicrobatchTrial:
    """Measurement of one number of microbatches at one number of sessions."""

    sessions: int
    microbatches: int
    began_at: float
    warmed_up: bool = False
    samples: int = 0


class MicrobatchTuner:
    """Choice for sessions that enter a chain here; a result holds for one number of sessions."""

    def __init__(self, fixed: int | None = None) -> None:
        """`fixed` is a constant number of microbatches; None measures."""
        self._fixed = fixed
        self._chosen: dict[int, int] = {}
        self._samples: dict[tuple[int, int], _RateSamples] = {}
        """By number of sessions and microbatches."""
        self._trial: _MicrobatchTrial | None = None
        self._sample_steps = 0
        """Session steps since `_sample_began_at`."""
        self._sample_began_at: float | None = None
        self._last_step_at = -math.inf

    def num_microbatches(self, sessions: int) -> int:
        """The number of microbatches for `sessions`."""
        if self._fixed is not None or sessions <= MAX_UNGROUPED_SESSIONS:
            return self._fixed or MAX_MICROBATCHES
        return self._chosen.get(sessions, MAX_MICROBATCHES)

    def discard_sample(self) -> None:
        """Discard the current sample: other work slowed the steps."""
        self._sample_began_at = None

    def record_steps(self, sessions: int, steps: int, now: float) -> None:
        """Record that `steps` of the `sessions` decoding sessions run one step each at `now`."""
        if self._fixed is not None or sessions <= MAX_UNGROUPED_SESSIONS:
            self._trial = None
            return
        trial, microbatches = self._trial, self.num_microbatches(sessions)
        if trial is None or (trial.sessions, trial.microbatches) != (sessions, microbatches):
            trial = self._trial = _MicrobatchTrial(sessions, microbatches, now)
            self._sample_began_at = None
        if self._sample_began_at is None or now - self._last_step_at > MAX_STEP_GAP_S:
            self._sample_began_at, self._last_step_at, self._sample_steps = now, now, 0
        else:
            self._last_step_at = now
            self._sample_steps += steps
            self._record_sample(trial, now)
        if trial.samples == SAMPLES_PER_TRIAL or now - trial.began_at > MAX_TRIAL_S:
            self._chosen[sessions] = self._choose_next(trial, now)
            trial.samples, trial.began_at = 0, now

    def _record_sample(self, trial: _MicrobatchTrial, now: float) -> None:
        """Add a sample from the steps since `_sample_began_at`, if there are enough."""
        steps = STEPS_PER_SAMPLE if trial.warmed_up else WARMUP_STEPS
        if self._sample_began_at is None or self._sample_steps < steps * trial.sessions:
            return
        if trial.warmed_up:
            seen = self._samples_of(trial.sessions, trial.microbatches)
            seen.rates.append(self._sample_steps / (now - self._sample_began_at))
            seen.sampled_at = now
            trial.samples += 1
        trial.warmed_up = True
        self._sample_began_at, self._sample_steps = now, 0

    def _choose_next(self, trial: _MicrobatchTrial, now: float) -> int:
        """The number of microbatches to use next."""
        other = MAX_MICROBATCHES + 1 - trial.microbatches
        here, there = (
            self._samples_of(trial.sessions, trial.microbatches),
            self._samples_of(trial.sessions, other),
        )
        if trial.samples < SAMPLES_PER_TRIAL:
            # Too few samples in this trial, for example under constant prefills.
            usual = other if there.has_enough else MAX_MICROBATCHES
            return trial.microbatches if here.has_enough else usual
        there.expire(now)
        if not there.has_enough:
            return other
        if not here.has_enough:
            return trial.microbatches
        return (
            other if median(there.rates) > MIN_SPEEDUP * median(here.rates) else trial.microbatches
        )

    def _samples_of(self, sessions: int, microbatches: int) -> _RateSamples:
        if len(self._samples) > MAX_TRACKED_CONFIGURATIONS:
            self._samples.clear()
            self._chosen.clear()
        return self._samples.setdefault((sessions, microbatches), _RateSamples())


T = TypeVar("T")

LOAD_WINDOW_S = 30.0


class Executor:
    """Runs jobs one at a time, first in first out, outside the event loop."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting = 0
        self._load = 0.0
        self._last_job_ended_at = time.monotonic()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    @property
    def idle_s(self) -> float:
        """Seconds since the last job ended; 0 while one runs or waits."""
        return 0.0 if self._waiting else max(time.monotonic() - self._last_job_ended_at, 0.0)

    @property
    def has_queue(self) -> bool:
        """Whether a job waits behind the running one."""
        return self._waiting > 1

    def run_inline(self, job: Callable[[], T]) -> T:
        """Run `job()` in the caller's thread. The device's thread must be idle."""
        assert self.is_idle
        return self._timed(job)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job()` in the device's thread and return its result.

        A started job cannot be interrupted: a cancelled call waits for it, however often it is
        cancelled, so that the caller never touches state that the job still changes.
        """
        self._waiting += 1
        started = self._pool.submit(self._timed, job)
        result = asyncio.wrap_future(started)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not started.cancel():
                await wait_until_done(result)
            raise
        finally:
            self._waiting -= 1

    def _timed(self, job: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return job()
        finally:
            self._record_busy(started, time.monotonic())

    def _record_busy(self, started: float, ended: float) -> None:
        """Update the exponential average of busy time over `LOAD_WINDOW_S`."""
        idle_s, busy_s = max(started - self._last_job_ended_at, 0.0), ended - started
        self._load *= 0.5 ** (idle_s / LOAD_WINDOW_S)
        self._load = 1.0 - (1.0 - self._load) * 0.5 ** (busy_s / LOAD_WINDOW_S)
        self._last_job_ended_at = ended

    @property
    def load(self) -> float:
        """Share of the last `LOAD_WINDOW_S` spent computing, plus the jobs that wait beyond one."""
        faded: float = self._load * 0.5 ** (self.idle_s / LOAD_WINDOW_S)
        return faded + max(self._waiting - 1, 0)


@asynccontextmanager
async def open_executor(*, is_background: bool = False) -> AsyncIterator[Executor]:
    """With `is_background` its thread, and those that torch starts for it, get what time is left.

    Only on Linux, where threads have priorities of their own.
    """
    pool = ThreadPoolExecutor(
        1,
        thread_name_prefix="nesa-background" if is_background else "nesa-device",
        initializer=lower_priority if is_background else None,
    )
    try:
        yield Executor(pool)
    finally:
        ending = asyncio.to_thread(pool.shutdown, cancel_futures=True)
        await wait_until_done(asyncio.ensure_future(ending))
