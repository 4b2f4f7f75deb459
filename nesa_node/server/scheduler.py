"""Continuous batching: runs the steps of all sessions of a node, one iteration after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import torch

from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.measure import PREFILL_TOKENS, Throughput
from nesa_node.engine.pages import PageTable
from nesa_node.server.batch import Share, run_shares
from nesa_node.server.executor import Executor
from nesa_node.server.iteration import Policy
from nesa_node.server.tallies import Tallies
from nesa_node.server.work import Work

log = get_logger(__name__)

Plan = Sequence[tuple[Work, int]]
"""Sessions with their token counts in one iteration."""
Shares = Sequence[tuple[Work, Share]]

BRIEF_S = 0.03
"""Longest step that may run inline, in the event loop, for a session that is alone on its node.
Waking the scheduler, the device's thread and the sender would add 0.4 ms to every step."""
PENANCE_S = 1.0
"""Seconds without inline execution after a step that exceeded `BRIEF_S`."""


class Scheduler:
    """All work of a node's device. The policy chooses a new batch before every iteration."""

    def __init__(self, executor: Executor, policy: Policy[Work]) -> None:
        self.executor = executor
        self.tallies = Tallies()
        self._policy = policy
        self._works: dict[Work, None] = {}
        self._wanted = asyncio.Event()
        self._iterating = False
        self._brief: tuple[Span, int] | None = None
        """Blocks and the most tokens of a step that may run inline."""
        self._not_here_before = 0.0
        self._last_size = 1

    @property
    def sessions(self) -> int:
        return len(self._works)

    @property
    def load(self) -> float:
        """Share of the last `LOAD_WINDOW_S` spent computing, plus the iterations that wait."""
        return self.executor.load + self.waiting / self._last_size

    @property
    def waiting(self) -> int:
        """Number of sessions with a step that can run."""
        return sum(work.waits for work in self._works)

    def expect(self, throughput: Throughput, span: Span) -> None:
        """Seed the cost model with measured throughput of `span`."""
        self._policy.cost.observe(1, 1 / throughput.decode_tokens_per_s / len(span))
        prefill_s = PREFILL_TOKENS / throughput.prefill_tokens_per_s
        self._policy.cost.observe(PREFILL_TOKENS, prefill_s / len(span))

    @asynccontextmanager
    async def work(
        self,
        tables: Sequence[PageTable],
        blocks: Blocks,
        *,
        client: PeerId,
        priority: int,
        dtype: torch.dtype,
        session: str = "",
    ) -> AsyncIterator[Work]:
        """Open a queue for a session, with one table for each of its rows; `dtype` is the outputs'
        dtype.

        `session` is its name in the log. On exit, also after a cancellation, no iteration uses the
        tables.
        """
        work = Work(
            tables,
            blocks,
            client=client,
            priority=priority,
            dtype=dtype,
            session=session,
            wake=self._wanted.set,
            run_here=self._run_here,
        )
        self._works[work] = None
        try:
            yield work
        finally:
            del self._works[work]
            self._wanted.set()
            if all(other.client != client for other in self._works):
                self._policy.forget(client)
            work.halt()
            await work.idle()

    async def run(self) -> None:
        """Iterate until cancelled. No iteration runs after that."""
        while True:
            self._wanted.clear()
            try:
                pause_s = await self._advance()
            except Exception as error:
                # A bug. Failing the sessions is better than a node that hangs.
                for work in self._works:
                    if work.waits:
                        work.fail(error)
            else:
                await self._wait(pause_s)

    async def _advance(self) -> float | None:
        """Run one iteration, or return the seconds to wait for steps; None: until one arrives."""
        now = time.monotonic()
        pause_s = self._policy.pause_s(self._works, now)
        if pause_s > 0:
            return pause_s
        plan = self._policy.plan(self._works, now)
        if not plan:
            return None
        await self._iterate(plan)
        return 0.0

    async def _wait(self, seconds: float | None) -> None:
        """Return as soon as a step arrives or a session leaves."""
        if seconds == 0.0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return

    def _run_here(self) -> bool:
        """Run the short step of a session that is alone inline. Returns whether it did."""
        if len(self._works) != 1 or self._iterating or not self.executor.idle:
            return False
        (work,) = self._works
        if self._brief is None or work.span != self._brief[0] or work.tokens > self._brief[1]:
            return False
        now = time.monotonic()
        if not (work.waits and work.decoding) or now < self._not_here_before:
            return False
        # Reset until `_learn` has run, so that a peer that sends many steps at once gets at most
        # one inline run per turn of the event loop.
        self._brief = None
        plan = self._policy.alone(work, now)
        with self._entered(plan) as shares:
            seconds = self.executor.run_here(partial(_run, shares)) if shares else 0.0
        if seconds > BRIEF_S:
            self._not_here_before = now + PENANCE_S
        # The sender of the output need not wait for this.
        asyncio.get_running_loop().call_soon(self._learn, plan, shares, seconds)
        return True

    async def _iterate(self, plan: Plan) -> None:
        with self._entered(plan) as shares:
            seconds = await self.executor.run(partial(_run, shares)) if shares else 0.0
        for work, _ in shares:
            work.announce()
        # Let the awakened tasks start to send before the next iteration is planned.
        await asyncio.sleep(0)
        self._learn(plan, shares, seconds)

    @contextmanager
    def _entered(self, plan: Plan) -> Iterator[Shares]:
        """Enter the planned sessions into an iteration, and store its outputs afterwards."""
        shares = []
        for work, tokens in plan:
            try:
                shares.append((work, work.enter(tokens)))
            except Exception as error:
                # A bug in one session's state.
                work.fail(error)
        self._iterating, self._last_size = True, max(len(shares), 1)
        try:
            yield shares
        finally:
            self._iterating = False
            for work, _ in shares:
                work.leave()
        for work, share in shares:
            work.deliver(share)

    def _learn(self, plan: Plan, shares: Shares, seconds: float) -> None:
        self.tallies.ran((share for _, share in shares), seconds, time.monotonic())
        if shares and len(shares) == len(plan) and all(share.error is None for _, share in shares):
            self._policy.ran(plan, seconds)
            lane = plan[0][0]
            self._brief = lane.span, self._policy.brief_tokens(lane, BRIEF_S)


def _run(shares: Shares) -> float:
    return run_shares(shares[0][0].blocks, [share for _, share in shares])


@asynccontextmanager
async def open_scheduler(executor: Executor) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(executor, Policy())
    running = asyncio.create_task(scheduler.run(), name="scheduler")
    try:
        yield scheduler
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
