"""Work of several threads done in one go: whoever comes first does it for all who wait.

T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

LARGEST_SHARED_TOKENS = 64
"""More than this is computed by itself: those who wait for one token would wait for all of it."""
MOST_TOGETHER = 256
"""Tokens that one thread computes in one go, so that their logits fit in memory."""


class _Call:
    """One caller's input, and what became of it."""

    def __init__(self, hidden_TD: torch.Tensor) -> None:
        self.hidden_TD = hidden_TD
        self.result_TV: torch.Tensor | None = None
        self.error: Exception | None = None
        self.leads = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def wait(self) -> None:
        self._wake.acquire()

    def wake(self) -> None:
        self._wake.release()


class Combined:
    """`compute` [T, D] -> [T, V], row by row, for any number of threads at once.

    While one thread computes, the others' inputs gather; the first of those then computes all of
    them together. An error reaches the caller whose input raises it. Results may differ in their
    last bits from those of `compute` alone, as they do with the number of rows.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._guard = threading.Lock()
        self._computing = False
        self._waiting: list[_Call] = []

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Raises what `compute` raises. The result may share memory with that of other callers."""
        if len(hidden_TD) > LARGEST_SHARED_TOKENS:
            return self._compute(hidden_TD)
        call = _Call(hidden_TD)
        with self._guard:
            call.leads = not self._computing
            self._computing = True
            if not call.leads:
                self._waiting.append(call)
        if not call.leads:
            self._wait(call)
        if call.leads:
            self._lead(call)
        if call.error is not None:
            raise call.error
        assert call.result_TV is not None
        return call.result_TV

    def _wait(self, call: _Call) -> None:
        try:
            call.wait()
        except BaseException:
            # Interrupted: nobody may wait for this thread to lead.
            with self._guard:
                if call in self._waiting:
                    self._waiting.remove(call)
            if call.leads:
                self._pass_on()
            raise

    def _lead(self, call: _Call) -> None:
        calls, tokens = [call], len(call.hidden_TD)
        with self._guard:
            while self._waiting:
                tokens += len(self._waiting[0].hidden_TD)
                if tokens > MOST_TOGETHER:
                    break
                calls.append(self._waiting.pop(0))
        try:
            _compute_all(self._compute, calls)
        finally:
            # After an interrupt of this thread the others have no result: they try again.
            undone = [c for c in calls[1:] if c.result_TV is None and c.error is None]
            with self._guard:
                self._waiting[:0] = undone
            self._pass_on()
            for other in calls[1:]:
                if other not in undone:
                    other.wake()

    def _pass_on(self) -> None:
        """Let the first who waits lead."""
        with self._guard:
            if not self._waiting:
                self._computing = False
                return
            following = self._waiting.pop(0)
            following.leads = True
        following.wake()


def _compute_all(compute: Callable[[torch.Tensor], torch.Tensor], calls: Sequence[_Call]) -> None:
    if len(calls) > 1:
        try:
            together_TV = compute(torch.cat([call.hidden_TD for call in calls]))
        except Exception:
            together_TV = None  # one of them is at fault: each by itself shows whose
        if together_TV is not None:
            parts = torch.split(together_TV, [len(call.hidden_TD) for call in calls])
            for call, part_TV in zip(calls, parts, strict=True):
                call.result_TV = part_TV
            return
    for call in calls:
        try:
            call.result_TV = compute(call.hidden_TD)
        except Exception as error:
            call.error = error
