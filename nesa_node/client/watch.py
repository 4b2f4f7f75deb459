"""Whether the steps of a session take longer than they should."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

STEPS = 12
"""Whose median counts: a few slow ones in a row are somebody else's prompt."""
WORSE = 1.5
SLACK_S = 0.02
"""What noise adds to short steps."""
PAUSE_S = 30.0
"""Between the first two looks at what else there is. Each pause is twice the one before."""
MAX_PAUSE_S = 1800.0


class Watch:
    """Compares decoded tokens with what the plan said, and with the best that there was.

    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected_s: float | None = None
        self._best_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._not_before = 0.0
        self._pause_s = PAUSE_S

    def begin(self, expected_s: float | None) -> None:
        """The session has another chain, whose steps should take `expected_s`, if that is known."""
        self._expected_s, self._best_s = expected_s, None
        self._steps_s.clear()
        self._not_before = self._clock() + PAUSE_S / 2

    def note(self, step_s: float) -> None:
        """One decoded token of each row has taken so long."""
        self._steps_s.append(step_s)
        if len(self._steps_s) == STEPS:
            median_s = statistics.median(self._steps_s)
            self._best_s = median_s if self._best_s is None else min(self._best_s, median_s)

    @property
    def step_s(self) -> float:
        """The median of the last steps. Not before there was one."""
        return statistics.median(self._steps_s)

    def complains(self) -> bool:
        """Whether it is time to look for something better; then not again for a while."""
        if len(self._steps_s) < STEPS or self._clock() < self._not_before:
            return False
        median_s = statistics.median(self._steps_s)
        known_s = [s for s in (self._expected_s, self._best_s) if s is not None]
        if median_s <= WORSE * min(known_s) + SLACK_S:
            return False
        self._not_before = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True
