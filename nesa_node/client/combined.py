"""Batching of head computations across threads: one thread computes for all that wait.

T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

LARGEST_SHARED_TOKENS = 64
"""Inputs above this many tokens are computed alone: callers with one token would wait for them."""
MOST_TOGETHER = 256
"""Largest batch, in tokens, so that its logits fit in memory."""
GATHER = 0.1
"""Wait for further callers, as a fraction of the compute time. Outputs that a node batched arrive
within some tenths of a millisecond."""
MOST_GATHER = 1.0
"""Upper bound of all these waits, as a fraction of the compute time: batching saves at most one
computation."""
COMPANY_S = 1.0
"""Seconds after a change of thread in which concurrent callers are expected."""


class _Call:
    """One caller's input, and its result or error."""

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
    """Batched version of `compute` ([T, D] -> [T, V], row by row) for any number of threads.

    While one thread computes, inputs of the rest queue up; the first of these becomes the next
    leader and computes all of them together. An error is raised only in the caller that caused it.
    Results may differ in their last bits from those of `compute` alone, as they do with the number
    of rows.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._guard = threading.Lock()
        self._computing = False
        self._waiting: list[_Call] = []
        self._took_s = 0.0
        self._expected = 0
        """Calls in the previous burst, which ended when the queue was empty."""
        self._came = 0
        self._last_thread = 0
        self._company_until = 0.0

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Raises what `compute` raises. The result may share memory with other callers' results."""
        if len(hidden_TD) > LARGEST_SHARED_TOKENS:
            return self._compute(hidden_TD)
        call = _Call(hidden_TD)
        with self._guard:
            call.leads = not self._computing
            self._computing = True
            if call.leads:
                self._expected, self._came = self._came, 0
            else:
                self._waiting.append(call)
            has_company = self._has_company()
        if not call.leads:
            self._wait(call)
        elif has_company:
            self._gather()
        if call.leads:
            self._lead(call)
        if call.error is not None:
            raise call.error
        assert call.result_TV is not None
        return call.result_TV

    def _has_company(self) -> bool:
        """Whether different threads have called within the last `COMPANY_S` seconds."""
        now, thread = time.monotonic(), threading.get_ident()
        if thread != self._last_thread:
            if self._last_thread:
                self._company_until = now + COMPANY_S
            self._last_thread = thread
        return now < self._company_until

    def _gather(self) -> None:
        try:
            pause_s, until = GATHER * self._took_s, time.monotonic() + MOST_GATHER * self._took_s
            seen = -1
            while seen < len(self._waiting) < self._expected - 1 and time.monotonic() < until:
                seen = len(self._waiting)
                time.sleep(pause_s)
        except BaseException:
            # Interrupted, as in `_wait`.
            self._pass_on()
            raise

    def _wait(self, call: _Call) -> None:
        try:
            call.wait()
        except BaseException:
            # Interrupted: another thread must lead instead.
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
        started = time.monotonic()
        try:
            _compute_all(self._compute, calls)
            self._took_s = time.monotonic() - started
        finally:
            # If this thread was interrupted, its followers have no result and queue up again.
            undone = [c for c in calls[1:] if c.result_TV is None and c.error is None]
            with self._guard:
                self._came += len(calls) - len(undone)
                self._waiting[:0] = undone
            self._pass_on()
            for other in calls[1:]:
                if other not in undone:
                    other.wake()

    def _pass_on(self) -> None:
        """Make the first waiting thread the leader."""
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
            together_TV = None  # one input is at fault: computing each alone finds it
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
