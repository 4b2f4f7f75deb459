"""What a thread makes, handed to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Delivery(AsyncIterator[T], Generic[T]):
    """Made inside the event loop that reads it. What is not read waits; the sender never does.

    So it holds as much as the sender may make. However much comes before the reader's turn, the
    event loop is woken once.
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
        """From the thread."""
        self._items.extend(items)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """From the thread: nothing follows, or `error`."""
        self._error = error
        self._is_over = True
        if self._is_closed:
            self._error = None
        self._wake()

    def close(self) -> None:
        """From the event loop: nothing is read any more.

        The traceback of an error that is kept holds the sender's frames, and those hold this.
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
        # In no variable of the frame that raises it: its traceback holds that frame, and each would
        # keep the other.
        error, self._error = self._error, None
        return StopAsyncIteration() if error is None else error

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            # The loop may have ended before the thread.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._notice)

    def _notice(self) -> None:
        self._is_woken = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
