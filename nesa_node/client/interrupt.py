"""Cancellation of a session from another thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any


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

    def watch(self, future: Future[Any] | None) -> None:
        """Cancel `future` at `set`, or now if it is set. Replaces the future before; None: no call
        runs.
        """
        with self._guard:
            self._future = future
            is_set = self._is_set
        if is_set and future is not None:
            future.cancel()
