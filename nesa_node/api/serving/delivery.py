"""Channel from a thread to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Delivery(AsyncIterator[T], Generic[T]):
    """Unbounded channel: a thread puts items without blocking, a coroutine iterates over them.

    Created within the reader's event loop, which is woken once for all items that are put before
    the reader runs. Unread items are kept, so the sender must bound their number.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._is_woken = False
        self._waiting: asyncio.Future[None] | None = None
        self._is_over = False
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, items: Iterable[T]) -> None:
        """Add items; called by the thread."""
        self._items.extend(items)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the iteration, with `error` if given; called by the thread."""
        self._error = error
        self._is_over = True
        if self._is_closed:
            self._error = None
        self._wake()

    def close(self) -> None:
        """Stop reading; called within the event loop.

        Drops the error: its traceback refers to the sender's frames, and those refer to this.
        """
        self._is_closed = True
        self._error = None

    async def __anext__(self) -> T:
        while not self._items:
            if self._is_over and not self._items:
                raise self._end()
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._items.popleft()

    def _end(self) -> BaseException:
        # The raising frame must not keep the error in a variable: the error's traceback refers to
        # that frame, which would be a reference cycle.
        error, self._error = self._error, None
        return StopAsyncIteration() if error is None else error

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            # The event loop may have been closed before the thread ended.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._notice)

    def _notice(self) -> None:
        self._is_woken = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
