"""Executor of all jobs on the device, in one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from nesa_node.swarm.p2p.tasks import wait_until_done

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
async def open_executor() -> AsyncIterator[Executor]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="nesa-device")
    try:
        yield Executor(pool)
    finally:
        ending = asyncio.to_thread(pool.shutdown, cancel_futures=True)
        await wait_until_done(asyncio.ensure_future(ending))
