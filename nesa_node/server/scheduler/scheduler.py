"""Continuous batching: runs the steps of all sessions of a node, one iteration after another.

Counters of what the device computed since the daemon began, over all spans.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import torch

from nesa_node.core import metric_names as names
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.throughput import MAX_PREFILL_TOKENS, SpanThroughput
from nesa_node.server.scheduler.batch import SessionBatch, run_batch
from nesa_node.server.scheduler.executor import Executor
from nesa_node.server.scheduler.policy import BatchPolicy
from nesa_node.server.scheduler.session_queue import MAX_DECODE_ROW_TOKENS, SessionQueue
from nesa_node.swarm.protocol.messages import Step


class SchedulerStats:
    """Computation counters. The scheduler adds each iteration after its outputs are delivered."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.batch = names.BATCH_SIZE.new_histogram()
        self.iteration_s = names.ITERATION_TIME.new_histogram()
        self.step_s = names.NODE_STEP_LATENCY.new_histogram()

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def record_iteration(self, batches: Iterable[SessionBatch], seconds: float, now: float) -> None:
        """Count an iteration of `seconds` that ended at `now` on the clock of
        `QueuedStep.arrived_at`."""
        sessions = 0
        for share in batches:
            sessions += 1
            if share.error is not None:
                self.failed += 1
                continue
            for piece in share.chunks:
                if _is_decode(piece.buffers.step):
                    self.decode_tokens += piece.end - piece.start
                else:
                    self.prefill_tokens += piece.end - piece.start
            for pending in share.completed_steps:
                self.step_s.observe(now - pending.arrived_at)
            self.steps += len(share.completed_steps)
        if sessions:
            self.batch.observe(sessions)
            self.iteration_s.observe(seconds)


def _is_decode(step: Step) -> bool:
    # A loop, since `all` takes three times as long.
    for part in step.rows:  # noqa: SIM110
        if part.count > MAX_DECODE_ROW_TOKENS:
            return False
    return True


log = get_logger(__name__)

IterationPlan = Sequence[tuple[SessionQueue, int]]
"""Sessions with their token counts in one iteration."""
SessionBatches = Sequence[tuple[SessionQueue, SessionBatch]]

INLINE_BUDGET_S = 0.03
"""Longest step that may run inline, in the event loop, for a session that is alone on its node.
Waking the scheduler, the device's thread and the sender would add 0.4 ms to every step."""
INLINE_COOLDOWN_S = 1.0
"""Seconds without inline execution after a step that exceeded `INLINE_BUDGET_S`."""


class Scheduler:
    """All work of a node's device. The policy chooses a new batch before every iteration."""

    def __init__(self, executor: Executor, policy: BatchPolicy[SessionQueue]) -> None:
        self.executor = executor
        self.stats = SchedulerStats()
        self._policy = policy
        self._queues: dict[SessionQueue, None] = {}
        self._work_available = asyncio.Event()
        self._iterating = False
        self._inline_limit: tuple[Span, int] | None = None
        """Blocks and the most tokens of a step that may run inline."""
        self._no_inline_before = 0.0
        self._last_batch_size = 1

    @property
    def sessions(self) -> int:
        return len(self._queues)

    @property
    def load(self) -> float:
        """Share of the last `LOAD_WINDOW_S` spent computing, plus the iterations that wait."""
        return self.executor.load + self.waiting_sessions / self._last_batch_size

    @property
    def waiting_sessions(self) -> int:
        """Number of sessions with a step that can run."""
        return sum(work.is_runnable for work in self._queues)

    def seed_cost(self, throughput: SpanThroughput, span: Span) -> None:
        """Seed the cost model with measured throughput of `span`."""
        self._policy.cost.observe(1, 1 / throughput.decode_tokens_per_s / len(span))
        prefill_s = MAX_PREFILL_TOKENS / throughput.prefill_tokens_per_s
        self._policy.cost.observe(MAX_PREFILL_TOKENS, prefill_s / len(span))

    @asynccontextmanager
    async def open_queue(
        self,
        tables: Sequence[PageTable],
        blocks: ModelBlocks,
        *,
        client: PeerId,
        priority: int,
        dtype: torch.dtype,
        session: str = "",
    ) -> AsyncIterator[SessionQueue]:
        """Open a queue for a session, with one table for each of its rows; `dtype` is the outputs'
        dtype.

        `session` is its name in the log. On exit, also after a cancellation, no iteration uses the
        tables.
        """
        work = SessionQueue(
            tables,
            blocks,
            client=client,
            priority=priority,
            dtype=dtype,
            session=session,
            wake_scheduler=self._work_available.set,
            try_inline=self._try_inline,
        )
        self._queues[work] = None
        try:
            yield work
        finally:
            del self._queues[work]
            self._work_available.set()
            if all(other.client != client for other in self._queues):
                self._policy.forget_client(client)
            work.clear_and_pause()
            await work.wait_until_idle()

    async def run(self) -> None:
        """Iterate until cancelled. No iteration runs after that."""
        while True:
            self._work_available.clear()
            try:
                pause_s = await self._advance()
            except Exception as error:
                # A bug. Failing the sessions is better than a node that hangs.
                for work in self._queues:
                    if work.is_runnable:
                        work.fail(error)
            else:
                await self._wait_for_work(pause_s)

    async def _advance(self) -> float | None:
        """Run one iteration, or return the seconds to wait for steps; None: until one arrives."""
        now = time.monotonic()
        pause_s = self._policy.batching_delay_s(self._queues, now)
        if pause_s > 0:
            return pause_s
        plan = self._policy.plan(self._queues, now)
        if not plan:
            return None
        await self._run_iteration(plan)
        return 0.0

    async def _wait_for_work(self, seconds: float | None) -> None:
        """Return as soon as a step arrives or a session leaves."""
        if seconds == 0.0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._work_available.wait()
        except TimeoutError:
            return

    def _try_inline(self) -> bool:
        """Run the short step of a session that is alone inline. Returns whether it did."""
        if len(self._queues) != 1 or self._iterating or not self.executor.is_idle:
            return False
        (work,) = self._queues
        if (
            self._inline_limit is None
            or work.span != self._inline_limit[0]
            or work.queued_tokens > self._inline_limit[1]
        ):
            return False
        now = time.monotonic()
        if not (work.is_runnable and work.has_decode_step) or now < self._no_inline_before:
            return False
        # Reset until `_record_iteration` has run, so that a peer that sends many steps at once gets
        # at most one inline run per turn of the event loop.
        self._inline_limit = None
        plan = self._policy.plan_single(work, now)
        with self._in_iteration(plan) as shares:
            seconds = self.executor.run_inline(partial(_run_on_device, shares)) if shares else 0.0
        if seconds > INLINE_BUDGET_S:
            self._no_inline_before = now + INLINE_COOLDOWN_S
        # The sender of the output need not wait for this.
        asyncio.get_running_loop().call_soon(self._record_iteration, plan, shares, seconds)
        return True

    async def _run_iteration(self, plan: IterationPlan) -> None:
        with self._in_iteration(plan) as shares:
            seconds = await self.executor.run(partial(_run_on_device, shares)) if shares else 0.0
        for work, _ in shares:
            work.wake_receiver()
        # Let the awakened tasks start to send before the next iteration is planned.
        await asyncio.sleep(0)
        self._record_iteration(plan, shares, seconds)

    @contextmanager
    def _in_iteration(self, plan: IterationPlan) -> Iterator[SessionBatches]:
        """Enter the planned sessions into an iteration, and store its outputs afterwards."""
        shares = []
        for work, tokens in plan:
            try:
                shares.append((work, work.start_iteration(tokens)))
            except Exception as error:
                # A bug in one session's state.
                work.fail(error)
        self._iterating, self._last_batch_size = True, max(len(shares), 1)
        try:
            yield shares
        finally:
            self._iterating = False
            for work, _ in shares:
                work.finish_iteration()
        for work, share in shares:
            work.store_outputs(share)

    def _record_iteration(
        self, plan: IterationPlan, batches: SessionBatches, seconds: float
    ) -> None:
        self.stats.record_iteration((share for _, share in batches), seconds, time.monotonic())
        if (
            batches
            and len(batches) == len(plan)
            and all(share.error is None for _, share in batches)
        ):
            self._policy.record_iteration(plan, seconds)
            lane = plan[0][0]
            self._inline_limit = lane.span, self._policy.inline_tokens(lane, INLINE_BUDGET_S)


def _run_on_device(batches: SessionBatches) -> float:
    return run_batch(batches[0][0].blocks, [share for _, share in batches])


@asynccontextmanager
async def open_scheduler(executor: Executor) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(executor, BatchPolicy())
    running = asyncio.create_task(scheduler.run(), name="scheduler")
    try:
        yield scheduler
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
