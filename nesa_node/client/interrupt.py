"""A way for one thread to end what another does in the swarm."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any


class Interrupt:
    """Ends what a session is doing, and everything that it would do next.

    Give it to `model.inference_session(...)`. Once it is set, opening the session and every call of
    it raise `concurrent.futures.CancelledError`, at once if one is under way, and the session is
    closed. Setting it again changes nothing.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_set = False
        self._future: Future[Any] | None = None

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """From any thread; does not wait for the end of what it ends."""
        with self._guard:
            self._is_set = True
            future = self._future
        if future is not None:
            future.cancel()

    def watch(self, future: Future[Any] | None) -> None:
        """Cancel `future` when this is set, or now if it is. One at a time; None: nothing runs."""
        with self._guard:
            self._future = future
            is_set = self._is_set
        if is_set and future is not None:
            future.cancel()
