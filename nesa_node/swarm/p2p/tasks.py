"""Background tasks and child processes, waiting for them, and the event loop that commands run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.logging import get_logger

log = get_logger(__name__)

Result = TypeVar("Result")

LATE_ANSWER_GRACE_S = 0.5
"""Time that slower peers have to answer after the first answer."""


class TaskSet:
    """Background tasks; a failure is logged and affects no other task, `close` cancels all.

    A `TaskGroup` would cancel its body and all siblings when one stream's handler fails, and wrap
    the body's own error in a group.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, coroutine: Coroutine[Any, Any, Result], *, name: str
    ) -> asyncio.Task[Result] | None:
        """Run `coroutine` as a task; after `close` it is discarded."""
        if self._closed:
            coroutine.close()
            return None
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def join(self) -> None:
        """Start no more tasks, and wait for the end of the running ones."""
        self._closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end, including tasks that they start meanwhile."""
        self._closed = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", task=task.get_name(), exc_info=error)


class SharedCall:
    """Single flight: one call at a time, shared by all that wait for it.

    Each call is a task of its own, so that it goes on when the caller that began it is cancelled.
    """

    def __init__(
        self,
        call: Callable[[], Awaitable[object]],
        *,
        pause_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.not_before = -math.inf
        """Earliest start of the next call by `clock`: `pause_s` after that of the last one."""
        self._call = call
        self._pause_s = pause_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._task_began_at = 0.0
        """By the event loop's clock."""
        self._succeeded_at = -math.inf
        """Start of the last call that succeeded."""

    async def run_since(
        self,
        since: float,
        *,
        unless: Callable[[], bool] = lambda: False,
        wait_s: float | None = None,
    ) -> bool:
        """Wait until a call that began after `since` (by `clock`) has succeeded, or `unless()`.

        False if a running call is `wait_s` old and not done; it goes on. Raises what a call raises.
        """
        while self._succeeded_at <= since and not unless():
            now = asyncio.get_running_loop().time()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run(), name="shared-call")
                # Suppresses asyncio's warning where all callers were cancelled.
                self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._task_began_at = now
            left_s = None if wait_s is None else self._task_began_at + wait_s - now
            task = self._task
            await asyncio.wait({task}, timeout=left_s)
            if not task.done():
                return False
            task.result()
        return True

    def expire(self) -> None:
        """Let the next caller wait for a new call."""
        self._succeeded_at = -math.inf

    async def _run(self) -> None:
        await asyncio.sleep(self.not_before - self._clock())
        began_at = self._clock()
        self.not_before = began_at + self._pause_s
        await self._call()
        self._succeeded_at = began_at

    async def close(self) -> None:
        """Cancel the running call."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def running_in_background(*work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run `work` beside the body; on exit it is cancelled and has ended. Its errors are dropped:
    long-running work logs its own.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather_until_first_answer(
    calls: Iterable[Coroutine[Any, Any, Result]],
) -> list[Result | PeerUnreachableError]:
    """Run calls to peers concurrently; cancel the remaining ones `LATE_ANSWER_GRACE_S` after the
    first answer.

    Returns each call's result in order, or a `PeerUnreachableError` for a peer that did not answer
    in time. Any other exception of a call is raised.
    """
    tasks = [asyncio.create_task(_call_outcome(call)) for call in calls]
    running = set(tasks)
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if not all(isinstance(task.result(), PeerUnreachableError) for task in done):
                break
        if running:
            _, running = await asyncio.wait(running, timeout=LATE_ANSWER_GRACE_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    late = PeerUnreachableError(f"no answer {LATE_ANSWER_GRACE_S:g} s after the first")
    return [late if task in running else task.result() for task in tasks]


async def _call_outcome(call: Coroutine[Any, Any, Result]) -> Result | PeerUnreachableError:
    try:
        return await call
    except PeerUnreachableError as error:
        return error


async def wait_until_done(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, even if the caller is cancelled meanwhile.

    A cancellation is raised afterwards. The caller retrieves the result of `future` itself.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if not future.cancelled():
        future.exception()  # suppresses asyncio's warning about an exception never retrieved
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # its traceback holds this frame


def run_event_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` like `asyncio.run`, on uvloop where it is installed.

    uvloop reduces the round-trip time of plain bytes by a third. Two uvloop loops in one process
    must not start child processes at the same time.
    """
    try:
        import uvloop
    except ImportError:  # uvloop does not exist for every platform
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def stop_process(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Terminate a child process that runs, and kill it if it has not ended after `timeout_s`."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
