"""Choice between one and two microbatches of decoding sessions, by measured throughput.

With two, the machines of a chain work at the same time, and so do nodes and clients. With one,
weights are read half as often. Which is faster depends on free processors and on token cost, which
a node cannot predict: both are tried.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

MOST_GROUPS = 2
MOST_ALONE = 2
"""At most this many sessions never wait for each other."""
SETTLING_STEPS = 2
"""Steps of each session that pass after a change before samples are taken."""
COUNTED_STEPS = 2
"""Steps of each session in one sample."""
SAMPLES_IN_TURN = 4
"""Samples of one number of microbatches before the numbers are compared or the other is tried."""
LEAST_SAMPLES = 8
"""Samples of each number before they are compared: one step may take twice as long as the last."""
MOST_SAMPLES = 16
MOST_TURN_S = 10.0
"""A trial ends after this time even without samples, as under constant prefills."""
AGAIN_S = 120.0
"""Samples of the unused number are trusted for this long; then some more are taken."""
IDLE_S = 1.0
BETTER = 1.03
"""The other number must be this many times as fast to be chosen."""
MOST_KNOWN = 256


@dataclass(slots=True)
class _Seen:
    """Session steps per second measured with one number of microbatches."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    at: float = -math.inf

    @property
    def enough(self) -> bool:
        return len(self.rates) >= LEAST_SAMPLES

    def age(self, now: float) -> None:
        if now - self.at > AGAIN_S:
            while len(self.rates) > LEAST_SAMPLES - SAMPLES_IN_TURN:
                self.rates.popleft()


@dataclass(slots=True)
class _Turn:
    """Measurement of one number of microbatches at one number of sessions."""

    sessions: int
    groups: int
    began: float
    settled: bool = False
    samples: int = 0


class Grouping:
    """Choice for sessions that enter a chain here; a result holds for one number of sessions."""

    def __init__(self, fixed: int | None = None) -> None:
        """`fixed` is a constant number of microbatches; None measures."""
        self._fixed = fixed
        self._in_use: dict[int, int] = {}
        self._seen: dict[tuple[int, int], _Seen] = {}
        """By number of sessions and microbatches."""
        self._turn: _Turn | None = None
        self._steps = 0
        """Session steps since `_since`."""
        self._since: float | None = None
        self._last = -math.inf

    def groups(self, sessions: int) -> int:
        """The number of microbatches for `sessions`."""
        if self._fixed is not None or sessions <= MOST_ALONE:
            return self._fixed or MOST_GROUPS
        return self._in_use.get(sessions, MOST_GROUPS)

    def disturb(self) -> None:
        """Discard the current sample: other work slowed the steps."""
        self._since = None

    def note(self, sessions: int, steps: int, now: float) -> None:
        """Record that `steps` of the `sessions` decoding sessions run one step each at `now`."""
        if self._fixed is not None or sessions <= MOST_ALONE:
            self._turn = None
            return
        turn, groups = self._turn, self.groups(sessions)
        if turn is None or (turn.sessions, turn.groups) != (sessions, groups):
            turn = self._turn = _Turn(sessions, groups, now)
            self._since = None
        if self._since is None or now - self._last > IDLE_S:
            self._since, self._last, self._steps = now, now, 0
        else:
            self._last = now
            self._steps += steps
            self._sample(turn, now)
        if turn.samples == SAMPLES_IN_TURN or now - turn.began > MOST_TURN_S:
            self._in_use[sessions] = self._next(turn, now)
            turn.samples, turn.began = 0, now

    def _sample(self, turn: _Turn, now: float) -> None:
        """Add a sample from the steps since `_since`, if there are enough."""
        steps = COUNTED_STEPS if turn.settled else SETTLING_STEPS
        if self._since is None or self._steps < steps * turn.sessions:
            return
        if turn.settled:
            seen = self._of(turn.sessions, turn.groups)
            seen.rates.append(self._steps / (now - self._since))
            seen.at = now
            turn.samples += 1
        turn.settled = True
        self._since, self._steps = now, 0

    def _next(self, turn: _Turn, now: float) -> int:
        """The number of microbatches to use next."""
        other = MOST_GROUPS + 1 - turn.groups
        here, there = self._of(turn.sessions, turn.groups), self._of(turn.sessions, other)
        if turn.samples < SAMPLES_IN_TURN:
            # Too few samples in this trial, for example under constant prefills.
            usual = other if there.enough else MOST_GROUPS
            return turn.groups if here.enough else usual
        there.age(now)
        if not there.enough:
            return other
        if not here.enough:
            return turn.groups
        return other if median(there.rates) > BETTER * median(here.rates) else turn.groups

    def _of(self, sessions: int, groups: int) -> _Seen:
        if len(self._seen) > MOST_KNOWN:
            self._seen.clear()
            self._in_use.clear()
        return self._seen.setdefault((sessions, groups), _Seen())
