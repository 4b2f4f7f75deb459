"""Event loop in a background thread, for synchronous callers, which can be interrupted."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from nesa_node.core.logging import get_logger

log = get_logger(__name__)


class Interrupt:
    """Cancels a session's current call and all later ones.

    Pass it to `model.inference_session(...)`. After `set`, opening the session and all its calls
    raise `concurrent.futures.CancelledError`, one in progress at once, and the session is closed.
    `set` is idempotent.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_set = False
        self._future: Future[Any] | None = None

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Cancel, from any thread, without waiting for the call to end."""
        with self._guard:
            self._is_set = True
            future = self._future
        if future is not None:
            future.cancel()

    def attach(self, future: Future[Any] | None) -> None:
        """Cancel `future`, the call that runs now if any, at `set`, or at once if it is set."""
        with self._guard:
            self._future = future
            is_set = self._is_set
        if is_set and future is not None:
            future.cancel()


_current: ContextVar[Interrupt | None] = ContextVar("interrupt", default=None)


@contextmanager
def interrupting(interrupt: Interrupt) -> Iterator[None]:
    """Have all calls of this thread that are given no other interrupt end with this one."""
    token = _current.set(interrupt)
    try:
        yield
    finally:
        _current.reset(token)


T = TypeVar("T")

INTERRUPT_CHECK_S = 0.5

MAX_UNREAD_ITEMS = 1
"""Most items in a channel that the thread has not read before the sender waits."""

RELEASE_TIMEOUT_S = 10.0
"""Timeout of leaving one context, in seconds, before its task is cancelled."""


class HeldContext(Generic[T]):
    """Context manager that one task of the loop has entered and leaves at `release`."""

    def __init__(self, loop: LoopThread, value: T, task: asyncio.Task[None]) -> None:
        self.value = value
        self._loop = loop
        self._task = task
        self._released = False

    @property
    def is_alive(self) -> bool:
        """False once the context has been left or has failed."""
        return not self._task.done()

    def release(self) -> None:
        """Leave the context and wait for that. Idempotent; errors are logged."""
        if not self._released:
            self._released = True
            self._loop.release_context(self._task)


class LoopChannel(Generic[T]):
    """Channel from a coroutine to a thread."""

    def __init__(self) -> None:
        self.is_abandoned = False
        """Whether the thread has stopped reading."""
        self._items: queue.SimpleQueue[T | Future[None]] = queue.SimpleQueue()
        self._sent_count = self._taken_count = 0
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def send(self, item: T) -> None:
        self._sent_count += 1
        self._items.put(item)

    async def wait_for_reader(self) -> None:
        """Wait until at most `MAX_UNREAD_ITEMS` items are unread, or the thread has stopped
        reading."""
        while self._sent_count - self._taken_count > MAX_UNREAD_ITEMS and not self.is_abandoned:
            taken, came = self._taken_count, asyncio.Event()
            self._waiting = asyncio.get_running_loop(), came
            if taken == self._taken_count and not self.is_abandoned:
                await came.wait()
            self._waiting = None

    def abandon(self) -> None:
        self.is_abandoned = True
        self._wake_sender()

    def finish(self, done: Future[None]) -> None:
        """Mark the end of the items."""
        self._items.put(done)

    def __iter__(self) -> Iterator[T]:
        """In the reading thread: wait for each item, interruptibly as `_wait` is."""
        while True:
            try:
                item = self._items.get(timeout=INTERRUPT_CHECK_S)
            except queue.Empty:
                continue
            if isinstance(item, Future):
                return
            self._taken_count += 1
            self._wake_sender()
            yield item

    def _wake_sender(self) -> None:
        if (waiting := self._waiting) is not None:
            loop, came = waiting
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(came.set)


class LoopThread:
    """Runs coroutines for synchronous callers in any number of threads.

    The thread starts with the first coroutine and ends with `close`, which first leaves all held
    contexts concurrently, and then those held with `release_last`. It is a daemon thread: a program
    that forgets `close` still ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()
        self._held_contexts: dict[asyncio.Task[None], asyncio.Event] = {}
        self._released_last: set[asyncio.Task[None]] = set()
        self._closed = False

    def run(
        self,
        work: Coroutine[Any, Any, T],
        *,
        interrupt: Interrupt | None = None,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Run `work` and wait. An interrupted wait (KeyboardInterrupt, or `interrupt`) cancels it.

        If `work` completed in the same moment, `undo` is called on the loop with its result. Raises
        whatever `work` raises, `concurrent.futures.CancelledError` where `interrupt` is set, and
        `RuntimeError` after `close` or on the loop's own thread.
        """
        # Created before the submission: an interrupt may come at any moment after that.
        future: Future[T] = Future()
        try:
            with self._watched(future, interrupt):
                self._submit(work, future, undo)
                return _wait(future)
        except BaseException:
            if not future.cancel() and undo is not None and future.exception() is None:
                self._call_soon(undo, future.result())
            raise
        finally:
            # It refers to the raised error, and its traceback to this frame.
            del future

    def stream(
        self,
        work: Callable[[LoopChannel[T]], Coroutine[Any, Any, None]],
        *,
        interrupt: Interrupt | None = None,
    ) -> Generator[T]:
        """Yield the items that `work(telling)` sends, until it returns.

        Closing the generator stops the reading and waits for `work`. Otherwise as `run`.
        """
        future: Future[None] = Future()
        telling: LoopChannel[T] = LoopChannel()
        future.add_done_callback(telling.finish)
        try:
            with self._watched(future, interrupt):
                self._submit(work(telling), future, None)
                try:
                    yield from telling
                except GeneratorExit:
                    telling.abandon()
                    return _wait(future)
                future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            del future

    def hold(
        self,
        context: AbstractAsyncContextManager[T],
        *,
        interrupt: Interrupt | None = None,
        release_last: bool = False,
    ) -> HeldContext[T]:
        """Enter `context` and keep it entered. Raises what entering raises.

        If interrupted, the context is left again in the background. `close` leaves contexts with
        `release_last` last, since other contexts depend on them.
        """
        entering = self._enter(context, release_last)
        value, task = self.run(entering, interrupt=interrupt, undo=self._release_unclaimed)
        return HeldContext(self, value, task)

    def release_context(self, task: asyncio.Task[None]) -> None:
        """Leave the context that `task` holds; no effect once the loop is closed."""
        try:
            self.run(self._release_context(task))
        except RuntimeError:
            if not self._closed:
                raise

    def close(self) -> None:
        """Leave all held contexts and end the thread. Idempotent, from any thread."""
        with self._guard:
            self._closed = True
            thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(stop.set)
        if thread is not threading.current_thread():
            thread.join()

    @contextmanager
    def _watched(self, future: Future[Any], interrupt: Interrupt | None) -> Iterator[None]:
        """Let `interrupt` cancel `future`. Raises `RuntimeError` if `close` cancelled it."""
        if (interrupt := interrupt or _current.get()) is not None:
            interrupt.attach(future)
        try:
            yield
        except CancelledError:
            if self._closed:
                raise RuntimeError("the model was closed while this ran") from None
            raise
        finally:
            if interrupt is not None:
                interrupt.attach(None)

    def _call_soon(self, call: Callable[[T], None], value: T) -> None:
        """Call on the loop; no effect once it is closed."""
        with self._guard:
            if not self._closed and self._loop is not None:
                self._loop.call_soon_threadsafe(call, value)

    def _submit(
        self,
        work: Coroutine[Any, Any, T],
        future: Future[T],
        undo: Callable[[T], None] | None,
    ) -> None:
        # The lock keeps `close` from ending the loop between check and submission: the future would
        # never be done.
        try:
            with self._guard:
                if self._closed:
                    raise RuntimeError("the model was closed")
                if threading.current_thread() is self._thread:
                    raise RuntimeError("a synchronous call inside the client's own event loop")
                self._ensure_started().call_soon_threadsafe(self._start, work, future, undo)
        except RuntimeError:
            work.close()
            raise

    def _start(
        self,
        work: Coroutine[Any, Any, T],
        future: Future[T],
        undo: Callable[[T], None] | None,
    ) -> None:
        """On the loop: run `work` as a task that completes `future`, cancelled or not."""
        if future.cancelled():
            work.close()
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        self._running.add(task)

        def finish(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                if error is None:
                    future.set_result(task.result())
                else:
                    future.set_exception(error)
            elif error is None and undo is not None:
                undo(task.result())

        def cancel(future: Future[T]) -> None:
            if future.cancelled() and not task.done():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(finish)
        future.add_done_callback(cancel)

    def _ensure_started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(ready)), name=self._name, daemon=True
            )
            self._thread.start()
            self._loop, self._stop = ready.result()
        return self._loop

    async def _serve(self, ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        async with self._group:
            await stop.wait()
            for tasks in (
                self._held_contexts.keys() - self._released_last,
                set(self._released_last),
            ):
                await asyncio.gather(*map(self._release_context, tasks))

    async def _enter(
        self, context: AbstractAsyncContextManager[T], release_last: bool
    ) -> tuple[T, asyncio.Task[None]]:
        entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        leaving = asyncio.Event()
        task = self._group.create_task(_hold(context, entered, leaving))
        self._held_contexts[task] = leaving
        task.add_done_callback(lambda done: self._held_contexts.pop(done, None))
        if release_last:
            self._released_last.add(task)
            task.add_done_callback(self._released_last.discard)
        try:
            return await entered, task
        except BaseException:
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            del entered  # as in `run`

    def _release_unclaimed(self, entered: tuple[Any, asyncio.Task[None]]) -> None:
        """Leave a context after an interrupt of its caller."""
        leaving = self._held_contexts.get(entered[1])
        if leaving is not None:
            leaving.set()

    async def _release_context(self, task: asyncio.Task[None]) -> None:
        leaving = self._held_contexts.get(task)
        if leaving is None:
            return
        leaving.set()
        _, late = await asyncio.wait([task], timeout=RELEASE_TIMEOUT_S)
        if late:
            log.warning("context_release_timed_out", timeout_s=RELEASE_TIMEOUT_S)
            task.cancel()
            await asyncio.wait([task], timeout=RELEASE_TIMEOUT_S)


def _wait(future: Future[T]) -> T:
    """Wait as `future.result()` does, but notice an interrupt that comes just before the wait.

    A signal that arrives between Python's last check and the system call does not end the call.
    """
    try:
        while True:
            try:
                return future.result(timeout=INTERRUPT_CHECK_S)
            except TimeoutError:
                if future.done():
                    return future.result()
    finally:
        del future  # as in `run`


async def _hold(
    context: AbstractAsyncContextManager[T], entered: asyncio.Future[T], leaving: asyncio.Event
) -> None:
    """Enter `context`, pass its value to `entered`, leave it once `leaving` is set."""
    try:
        async with context as value:
            if not entered.done():
                entered.set_result(value)
            await leaving.wait()
    except asyncio.CancelledError:
        entered.cancel()
        raise
    except Exception as error:
        if entered.done():
            log.warning("context_failed", error=repr(error))
        else:
            entered.set_exception(error)
    finally:
        del entered  # as in `run`
