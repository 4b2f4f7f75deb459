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
"""Up to so many rows never wait for each other."""
SETTLING_STEPS = 2
"""After a change so many steps of each session pass before they are counted."""
COUNTED_STEPS = 2
"""Of each session, for one sample."""
SAMPLES_IN_TURN = 4
LEAST_SAMPLES = 8
"""Of each number before they are compared: a step may take twice as long as the one before."""
MOST_SAMPLES = 16
AGAIN_S = 120.0
"""So long what is not in use is taken to be as it was; then some samples more are due."""
BETTER = 1.03
"""So many times as fast another number must be to take the place of the one in use."""


@dataclass(slots=True)
class _Seen:
    """Tokens per second with one number of groups."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    at: float = -math.inf

    def enough(self, now: float) -> bool:
        if now - self.at > AGAIN_S:
            while len(self.rates) > LEAST_SAMPLES - SAMPLES_IN_TURN:
                self.rates.popleft()
        return len(self.rates) >= LEAST_SAMPLES


@dataclass(slots=True)
class _Trial:
    rows: int
    groups: int
    began: float
    tokens: int = 0
    samples: int = -1
    """-1 while it settles."""


class Grouping:
    """Where sessions enter a chain: what was found for so many rows holds for nearly as many."""

    def __init__(self, fixed: int | None = None) -> None:
        """`fixed`: that many groups, whatever comes of it."""
        self._fixed = fixed
        self._in_use: dict[int, int] = {}
        self._seen: dict[tuple[int, int], _Seen] = {}
        """By the size of rows, and groups."""
        self._trial: _Trial | None = None

    def groups(self, rows: int) -> int:
        """How many to make of `rows`."""
        return self._fixed or self._in_use.get(rows.bit_length(), MOST_GROUPS)

    def group_rows(self, rows: int) -> int:
        """How many rows a group has if there are `rows` in all."""
        return math.ceil(rows / self.groups(rows))

    def note(self, rows: int, tokens: int, now: float, *, disturbed: bool) -> None:
        """`tokens` steps of decodes run now, of `rows` in all; `disturbed`: other work, too."""
        if self._fixed is not None or rows <= MOST_ALONE:
            return
        trial, groups = self._trial, self.groups(rows)
        if trial is None or disturbed or (trial.rows, trial.groups) != (rows, groups):
            self._trial = _Trial(rows, groups, now)
            return
        trial.tokens += tokens
        steps = SETTLING_STEPS if trial.samples < 0 else COUNTED_STEPS
        if trial.tokens < steps * rows:
            return
        if trial.samples >= 0:
            seen = self._of(rows, groups)
            seen.rates.append(trial.tokens / (now - trial.began))
            seen.at = now
        trial.samples, trial.tokens, trial.began = trial.samples + 1, 0, now
        if trial.samples == SAMPLES_IN_TURN:
            trial.samples = 0
            self._in_use[rows.bit_length()] = self._best(rows, groups, now)

    def _best(self, rows: int, groups: int, now: float) -> int:
        """Which number to use next; `groups` is in use."""
        other = MOST_GROUPS + 1 - groups
        here, there = self._of(rows, groups), self._of(rows, other)
        if not there.enough(now):
            return other
        if not here.enough(now):
            return groups
        return other if median(there.rates) > BETTER * median(here.rates) else groups

    def _of(self, rows: int, groups: int) -> _Seen:
        return self._seen.setdefault((rows.bit_length(), groups), _Seen())
