"""Detection of sessions with steps slower than expected."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

MEDIAN_STEPS = 12
"""Steps in the compared median: a few slow ones in a row are usually another session's prefill."""
SLOWDOWN_FACTOR = 1.5
"""Ratio of the median to the expected or best step time above which steps are slow."""
SLACK_S = 0.02
"""Allowance for noise in short steps, in seconds."""
FIRST_CHECK_PAUSE_S = 30.0
"""Pause after the first alarm, in seconds. Each further pause doubles."""
MAX_CHECK_PAUSE_S = 1800.0
"""Longest pause, in seconds."""


class SlowdownDetector:
    """Compares decode steps with the plan's expectation and with the best median so far.

    `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected_s: float | None = None
        self._best_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._not_before = 0.0
        self._pause_s = FIRST_CHECK_PAUSE_S

    def start_chain(self, expected_s: float | None) -> None:
        """Start over with a new chain. Its steps should take `expected_s`, if known."""
        self._expected_s, self._best_s = expected_s, None
        self._steps_s.clear()
        self._not_before = self._clock() + FIRST_CHECK_PAUSE_S / 2

    def record_step(self, step_s: float) -> None:
        """Add the seconds of one decode step."""
        self._steps_s.append(step_s)
        if len(self._steps_s) == MEDIAN_STEPS:
            median_s = statistics.median(self._steps_s)
            self._best_s = median_s if self._best_s is None else min(self._best_s, median_s)

    @property
    def step_s(self) -> float:
        """Median of the last steps. Needs at least one."""
        return statistics.median(self._steps_s)

    def should_reconsider(self) -> bool:
        """Whether to search for a better chain now; after True, False for a pause."""
        if len(self._steps_s) < MEDIAN_STEPS or self._clock() < self._not_before:
            return False
        median_s = statistics.median(self._steps_s)
        known_s = [s for s in (self._expected_s, self._best_s) if s is not None]
        if median_s <= SLOWDOWN_FACTOR * min(known_s) + SLACK_S:
            return False
        self._not_before = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_CHECK_PAUSE_S)
        return True
