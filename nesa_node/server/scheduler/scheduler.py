"""Continuous batching: runs the steps of all sessions of a node, one iteration after another.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.metrics import BATCH_SIZE, ITERATION_TIME, NODE_STEP_LATENCY
from nesa_node.engine.adapters.served_adapter import ServedAdapter
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.kernels.threads import clipped_mean
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import MAX_PREFILL_TOKENS, SpanThroughput
from nesa_node.server.scheduler.batch import Executor, SessionBatch, run_batch
from nesa_node.server.scheduler.policy import BatchPolicy
from nesa_node.server.scheduler.session_queue import MAX_DECODE_ROW_TOKENS, SessionQueue
from nesa_node.swarm.p2p.tasks import running_in_background
from nesa_node.swarm.protocol.messages import Step


class SchedulerStats:
    """What the device computed since the daemon began, over all spans. An iteration is added after
    its outputs are delivered."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.batch = BATCH_SIZE.new_histogram()
        self.iteration_s = ITERATION_TIME.new_histogram()
        self.step_s = NODE_STEP_LATENCY.new_histogram()

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def record_iteration(self, batches: Iterable[SessionBatch], seconds: float, now: float) -> None:
        """Count an iteration of `seconds` that ended at `now` on the clock of
        `QueuedStep.arrived_at`."""
        sessions = 0
        for batch in batches:
            sessions += 1
            if batch.error is not None:
                self.failed += 1
                continue
            for chunk in batch.chunks:
                if _is_decode(chunk.buffers.step):
                    self.decode_tokens += chunk.end - chunk.start
                else:
                    self.prefill_tokens += chunk.end - chunk.start
            for step in batch.completed_steps:
                self.step_s.observe(now - step.arrived_at)
            self.steps += len(batch.completed_steps)
        if sessions:
            self.batch.observe(sessions)
            self.iteration_s.observe(seconds)


MAX_TIMED_CONTEXT_TOKENS = 1024
"""Longest context of a timed step: attention over longer ones would tell of the prompts instead."""
MIN_DECODE_TIMES = 16
MAX_DECODE_TIMES = 256


class DecodeTimes:
    """Durations of the last iterations of one token each, through one span."""

    def __init__(self) -> None:
        self._span: Span | None = None
        self._seconds: deque[float] = deque(maxlen=MAX_DECODE_TIMES)

    def record(self, queue: SessionQueue, seconds: float) -> None:
        """Record an iteration of one token of `queue`."""
        if queue.span != self._span:
            self._span = queue.span
            self._seconds.clear()
        if max(table.length for table in queue.tables) <= MAX_TIMED_CONTEXT_TOKENS:
            self._seconds.append(seconds)

    def take_mean_s(self, span: Span) -> float | None:
        """Clipped mean of the iterations through `span` since the last result; None while they are
        fewer than `MIN_DECODE_TIMES`.
        """
        if span != self._span or len(self._seconds) < MIN_DECODE_TIMES:
            return None
        step_s = clipped_mean(self._seconds)
        self._seconds.clear()
        return step_s


def _is_decode(step: Step) -> bool:
    # A loop, since `all` takes three times as long.
    for row_slice in step.rows:  # noqa: SIM110
        if row_slice.count > MAX_DECODE_ROW_TOKENS:
            return False
    return True


INLINE_BUDGET_S = 0.03
"""Longest step that may run inline, in the event loop, for a session that is alone on its node.
Waking the scheduler, the device's thread and the sender would add 0.4 ms to every step."""
INLINE_COOLDOWN_S = 1.0
"""Seconds without inline execution after a step that exceeded `INLINE_BUDGET_S`."""


@dataclass(slots=True, kw_only=True)
class Iteration:
    """Sessions that run together, with what each of them runs."""

    plan: Sequence[tuple[SessionQueue, int]]
    """Sessions with their token counts."""
    batches: list[tuple[SessionQueue, SessionBatch]]
    """Without sessions that could not take part."""
    seconds: float | None = None
    """Duration on the device; None until it has run."""

    def run(self) -> float:
        """Run the iteration in the calling thread and return its duration."""
        return run_batch(self.plan[0][0].blocks, [batch for _, batch in self.batches])

    def wake_receivers(self) -> None:
        # Not in the scheduler's loop, whose variables would keep the last session's step.
        for queue, _ in self.batches:
            queue.wake_receiver()


class Scheduler:
    """All computation of a node's device: `schedule` an iteration, run it, `commit` it.

    The policy chooses a new batch before every iteration.
    """

    def __init__(self, executor: Executor, policy: BatchPolicy[SessionQueue]) -> None:
        self.executor = executor
        self.stats = SchedulerStats()
        self.decode_times = DecodeTimes()
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
        return sum(queue.is_runnable for queue in self._queues)

    def count_decoding(self) -> int:
        """Number of sessions that decode now."""
        now = time.monotonic()
        return sum(queue.is_decoding(now) for queue in self._queues)

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
        adapter: ServedAdapter | None = None,
    ) -> AsyncIterator[SessionQueue]:
        """Open a queue for a session, with one table for each of its rows; `dtype` is the outputs'
        dtype.

        `session` is its name in the log. On exit, also after a cancellation, no iteration uses the
        tables.
        """
        queue = SessionQueue(
            tables,
            blocks,
            client=client,
            priority=priority,
            dtype=dtype,
            session=session,
            adapter=adapter,
        )
        self._queues[queue] = None
        try:
            yield queue
        finally:
            del self._queues[queue]
            self._work_available.set()
            if all(other.client != client for other in self._queues):
                self._policy.forget_client(client)
            queue.clear_and_pause()
            await queue.wait_until_idle()

    def resume(self, queue: SessionQueue) -> None:
        """Run the steps of a paused session again."""
        queue.paused = False
        self._work_available.set()

    def submit(self, queue: SessionQueue, step: Step, hidden: HiddenStates) -> None:
        """Queue a step [T, D]; its rows continue where the steps before it end.

        If the step runs inline, its output is ready on return but no waiter is woken: call
        `wake_receiver` or `take_output`.
        """
        queue.append(step, hidden)
        iteration = self.schedule_inline()
        if iteration is None:
            self._work_available.set()
            return
        try:
            iteration.seconds = self.executor.run_inline(iteration.run)
        finally:
            self.commit(iteration)
        if iteration.seconds > INLINE_BUDGET_S:
            self._no_inline_before = queue.scheduled_at + INLINE_COOLDOWN_S
        # The sender of the output need not wait for this.
        asyncio.get_running_loop().call_soon(self._record, iteration)

    async def run(self) -> None:
        """Iterate until cancelled. No iteration runs after that."""
        while True:
            self._work_available.clear()
            now = time.monotonic()
            try:
                delay_s = self._policy.batching_delay_s(self._queues, now)
                iteration = None if delay_s > 0 else self.schedule(now)
                if iteration is None:
                    await self._wait_for_work(delay_s or None)
                    continue
                try:
                    iteration.seconds = await self.executor.run(iteration.run)
                finally:
                    self.commit(iteration)
                iteration.wake_receivers()
                # Let the awakened tasks start to send before the next iteration is planned.
                await asyncio.sleep(0)
                self._record(iteration)
            except Exception as error:
                # A bug. Failing the sessions is better than a node that hangs.
                self._fail_runnable(error)

    def _fail_runnable(self, error: Exception) -> None:
        for queue in self._queues:
            if queue.is_runnable:
                queue.fail(error)

    def schedule(self, now: float) -> Iteration | None:
        """The next iteration; None if no session can run."""
        plan = self._policy.plan(self._queues, now)
        return self._start(plan) if plan else None

    def schedule_inline(self) -> Iteration | None:
        """An iteration of one short decode step, if its session is alone and it may run inline."""
        if len(self._queues) != 1 or self._iterating or not self.executor.is_idle:
            return None
        (queue,) = self._queues
        if self._inline_limit is None:
            return None
        span, tokens = self._inline_limit
        if queue.span != span or queue.queued_tokens > tokens:
            return None
        now = time.monotonic()
        if not (queue.is_runnable and queue.has_decode_step) or now < self._no_inline_before:
            return None
        # Reset until `_record` has run, so that a peer that sends many steps at once gets at most
        # one inline run per turn of the event loop.
        self._inline_limit = None
        return self._start(self._policy.plan_single(queue, now))

    def commit(self, iteration: Iteration) -> None:
        """Give the tables back, and store the outputs if the iteration ran to its end."""
        self._iterating = False
        for queue, _ in iteration.batches:
            queue.finish_iteration()
        if iteration.seconds is not None:
            for queue, batch in iteration.batches:
                queue.store_outputs(batch)

    def _start(self, plan: Sequence[tuple[SessionQueue, int]]) -> Iteration:
        """Take the planned tokens from their queues."""
        iteration = Iteration(plan=plan, batches=[])
        for queue, tokens in plan:
            try:
                iteration.batches.append((queue, queue.start_iteration(tokens)))
            except Exception as error:
                # A bug in one session's state.
                queue.fail(error)
        self._iterating, self._last_batch_size = True, max(len(iteration.batches), 1)
        return iteration

    async def _wait_for_work(self, seconds: float | None) -> None:
        """Return as soon as a step arrives or a session leaves, or after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._work_available.wait()
        except TimeoutError:
            return

    def _record(self, iteration: Iteration) -> None:
        """Count the iteration, and learn from one in which every step succeeded."""
        plan, batches, seconds = iteration.plan, iteration.batches, iteration.seconds
        assert seconds is not None
        self.stats.record_iteration((batch for _, batch in batches), seconds, time.monotonic())
        if len(batches) == len(plan) and all(batch.error is None for _, batch in batches):
            self._policy.record_iteration(plan, seconds)
            queue, tokens = plan[0]
            if len(plan) == tokens == 1:
                self.decode_times.record(queue, seconds)
            self._inline_limit = queue.span, self._policy.inline_tokens(queue, INLINE_BUDGET_S)


@asynccontextmanager
async def open_scheduler(executor: Executor) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(executor, BatchPolicy())
    async with running_in_background(scheduler.run()):
        yield scheduler
