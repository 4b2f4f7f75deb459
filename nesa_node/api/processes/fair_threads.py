"""Thread pool that is shared fairly among callers; malloc for a process with many threads."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_Work = Callable[[], Any]


class FairThreadPool:
    """Thread pool of `threads` threads, of which one caller may use `max_per_caller`.

    The next work to run is of the caller with the fewest running threads, in order of arrival.
    The caller "" stands for servers without keys and may use all threads. Thread-safe. Close it
    with `shutdown`.
    """

    def __init__(self, threads: int, *, max_per_caller: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._max_per_caller = max_per_caller
        self._lock = threading.Lock()
        self._waiting: dict[Future[Any], tuple[str, _Work]] = {}
        self._running: Counter[str] = Counter()
        self._closed = False

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Queue `work`; return a future of its result. Cancelling it removes it from the queue.

        Raises `RuntimeError` after `shutdown`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these threads take no more work")
            self._waiting[future] = caller, work
        future.add_done_callback(self._remove_waiting)
        self._start_waiting()
        return future

    def shutdown(self) -> None:
        """Cancel queued work and wait for running work. May be called twice."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()
        self._pool.shutdown()

    def _remove_waiting(self, future: Future[Any]) -> None:
        with self._lock:
            waited = self._waiting.pop(future, None) is not None
        if waited:
            # Cancelled while queued: this notifies `concurrent.futures.wait`.
            future.set_running_or_notify_cancel()

    def _start_waiting(self) -> None:
        with self._lock:
            while not self._closed and (future := self._next_future()) is not None:
                caller, work = self._waiting.pop(future)
                self._running[caller] += 1
                self._pool.submit(self._run, caller, future, work)

    def _next_future(self) -> Future[Any] | None:
        """Next work to run if a thread is free. Linear in the queue: about a thousand entries."""
        if self._running.total() >= self._threads:
            return None
        may_begin = (
            (self._running[caller], number, future)
            for number, (future, (caller, _)) in enumerate(self._waiting.items())
            if not caller or self._running[caller] < self._max_per_caller
        )
        return min(may_begin, key=lambda each: each[:2], default=(0, 0, None))[2]

    def _run(self, caller: str, future: Future[Any], work: _Work) -> None:
        try:
            if future.set_running_or_notify_cancel():
                _set_result(future, work)
        finally:
            with self._lock:
                self._running[caller] -= 1
                self._running += Counter()
            self._start_waiting()


def _set_result(future: Future[Any], work: _Work) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # Avoids a reference cycle: the error's traceback refers to this frame.
        del future
    else:
        future.set_result(result)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_ARENAS = 2
_MMAP_THRESHOLD_BYTES = 1 << 20
_TRIM_THRESHOLD_BYTES = 8 << 20
_mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)


def share_malloc_arenas() -> None:
    """Limit malloc's arenas, so that threads reuse each other's memory. Call before threads start.

    Without effect unless the C library is glibc. By default glibc has eight arenas per core, and
    each keeps the memory of its thread's logits: hundreds of MiB that no other request can use.
    glibc also raises its mmap threshold, up to 32 MiB, when a mapped block is freed; large blocks
    then come from arenas, where small blocks fragment them. A fixed threshold keeps large blocks
    mapped, so that freeing returns them to the system.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, _MAX_ARENAS)
        _mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        # A fixed mmap threshold would otherwise return and refault the memory of each request.
        _mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
