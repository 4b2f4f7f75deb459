"""Thread pool that is shared fairly among callers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_Piece = Callable[[], Any]


class FairThreads:
    """Thread pool of `threads` threads, of which one caller may use `most_of_one`.

    The next work to run is of the caller with the fewest running threads, in order of arrival.
    The caller "" stands for servers without keys and may use all threads. Thread-safe. Close it
    with `shutdown`.
    """

    def __init__(self, threads: int, *, most_of_one: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._most_of_one = most_of_one
        self._guard = threading.Lock()
        self._waiting: dict[Future[Any], tuple[str, _Piece]] = {}
        self._running: Counter[str] = Counter()
        self._closed = False

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Queue `work`; return a future of its result. Cancelling it removes it from the queue.

        Raises `RuntimeError` after `shutdown`.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._closed:
                raise RuntimeError("these threads take no more work")
            self._waiting[future] = caller, work
        future.add_done_callback(self._forget)
        self._begin()
        return future

    def shutdown(self) -> None:
        """Cancel queued work and wait for running work. May be called twice."""
        with self._guard:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()
        self._pool.shutdown()

    def _forget(self, future: Future[Any]) -> None:
        with self._guard:
            waited = self._waiting.pop(future, None) is not None
        if waited:
            # Cancelled while queued: this notifies `concurrent.futures.wait`.
            future.set_running_or_notify_cancel()

    def _begin(self) -> None:
        with self._guard:
            while not self._closed and (future := self._next()) is not None:
                caller, work = self._waiting.pop(future)
                self._running[caller] += 1
                self._pool.submit(self._do, caller, future, work)

    def _next(self) -> Future[Any] | None:
        """Next work to run if a thread is free. Linear in the queue: about a thousand entries."""
        if self._running.total() >= self._threads:
            return None
        may_begin = (
            (self._running[caller], number, future)
            for number, (future, (caller, _)) in enumerate(self._waiting.items())
            if not caller or self._running[caller] < self._most_of_one
        )
        return min(may_begin, key=lambda each: each[:2], default=(0, 0, None))[2]

    def _do(self, caller: str, future: Future[Any], work: _Piece) -> None:
        try:
            if future.set_running_or_notify_cancel():
                _settle(future, work)
        finally:
            with self._guard:
                self._running[caller] -= 1
                self._running += Counter()
            self._begin()


def _settle(future: Future[Any], work: _Piece) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # Avoids a reference cycle: the error's traceback refers to this frame.
        del future
    else:
        future.set_result(result)
