"""Executor of all jobs on the device, in one thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from nesa_node.swarm.tasks import ended

T = TypeVar("T")

LOAD_WINDOW_S = 30.0


class Executor:
    """Runs jobs one at a time, first in first out, outside the event loop."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting = 0
        self._load = 0.0
        self._marked_at = time.monotonic()

    @property
    def idle(self) -> bool:
        return not self._waiting

    @property
    def idle_s(self) -> float:
        """Seconds since the last job ended; 0 while one runs or waits."""
        return 0.0 if self._waiting else max(time.monotonic() - self._marked_at, 0.0)

    @property
    def has_queue(self) -> bool:
        """Whether a job waits behind the running one."""
        return self._waiting > 1

    def run_here(self, job: Callable[[], T]) -> T:
        """Run `job()` in the caller's thread. The device's thread must be idle."""
        assert self.idle
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
                await ended(result)
            raise
        finally:
            self._waiting -= 1

    def _timed(self, job: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return job()
        finally:
            self._note(started, time.monotonic())

    def _note(self, started: float, ended: float) -> None:
        """Update the exponential average of busy time over `LOAD_WINDOW_S`."""
        idle_s, busy_s = max(started - self._marked_at, 0.0), ended - started
        self._load *= 0.5 ** (idle_s / LOAD_WINDOW_S)
        self._load = 1.0 - (1.0 - self._load) * 0.5 ** (busy_s / LOAD_WINDOW_S)
        self._marked_at = ended

    @property
    def load(self) -> float:
        """Share of the last `LOAD_WINDOW_S` spent computing, plus the jobs that wait beyond one."""
        idle_s = max(time.monotonic() - self._marked_at, 0.0) if not self._waiting else 0.0
        faded: float = self._load * 0.5 ** (idle_s / LOAD_WINDOW_S)
        return faded + max(self._waiting - 1, 0)


@asynccontextmanager
async def open_executor() -> AsyncIterator[Executor]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="nesa-device")
    try:
        yield Executor(pool)
    finally:
        ending = asyncio.to_thread(pool.shutdown, cancel_futures=True)
        await ended(asyncio.ensure_future(ending))
