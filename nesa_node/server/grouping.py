"""Whether sessions that decode go through a chain in one group or in two: what gave more tokens.

In two, the machines of a chain work at the same time, and so do nodes and clients. In one, weights
are read half as often. Which is faster depends on the processors that are free, on what tokens cost
and on who shares what with whom, of which a node knows little: it tries both.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

MOST_GROUPS = 2
MOST_ALONE = 2
"""Up to so many sessions never wait for each other."""
SETTLING_STEPS = 2
"""After a change so many steps of each session pass before they are counted."""
COUNTED_STEPS = 2
"""Of each session, for one sample."""
SAMPLES_IN_TURN = 4
"""Before the other number has its turn, or they are compared."""
LEAST_SAMPLES = 8
"""Of each number before they are compared: a step may take twice as long as the one before."""
MOST_SAMPLES = 16
MOST_TURN_S = 10.0
"""Where prefills leave no samples to be had, a turn ends all the same."""
AGAIN_S = 120.0
"""So long what is not in use is taken to be as it was; then some samples more are due."""
IDLE_S = 1.0
BETTER = 1.03
"""So many times as fast another number must be to take the place of the one in use."""
MOST_KNOWN = 256


@dataclass(slots=True)
class _Seen:
    """Steps of sessions per second with one number of groups."""

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
    """Of one number of groups, for so many sessions."""

    sessions: int
    groups: int
    began: float
    settled: bool = False
    samples: int = 0


class Grouping:
    """Where sessions enter a chain. What is found holds for as many sessions, whichever."""

    def __init__(self, fixed: int | None = None) -> None:
        """`fixed`: that many groups, whatever comes of it."""
        self._fixed = fixed
        self._in_use: dict[int, int] = {}
        self._seen: dict[tuple[int, int], _Seen] = {}
        """By sessions and groups."""
        self._turn: _Turn | None = None
        self._steps = 0
        """Since `_since`; of one session each."""
        self._since: float | None = None
        self._last = -math.inf

    def groups(self, sessions: int) -> int:
        """How many to make of `sessions`."""
        if self._fixed is not None or sessions <= MOST_ALONE:
            return self._fixed or MOST_GROUPS
        return self._in_use.get(sessions, MOST_GROUPS)

    def disturb(self) -> None:
        """Other work is in the way: how long steps take now says nothing."""
        self._since = None

    def note(self, sessions: int, steps: int, now: float) -> None:
        """A step of each of `steps` sessions runs now, of `sessions` that decode."""
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
        """Count what ran since `_since`, if it is enough for that."""
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
        """How many groups to make from now on."""
        other = MOST_GROUPS + 1 - turn.groups
        here, there = self._of(turn.sessions, turn.groups), self._of(turn.sessions, other)
        if turn.samples < SAMPLES_IN_TURN:
            # Nothing can be learnt these days.
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
