"""Tuner of the number of threads for steps of one size, by trials of a larger and a smaller number.

The fastest number depends on what other processes leave idle: compared with one thread a step on
two takes half as long if two cores are free, and three times as long if one is not, since each
product waits for its slowest thread. So alternatives are tried for a few steps at intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

BLOCK_STEPS = 3
"""Steps counted per turn of one number of threads."""
BLOCK_S = 0.3
"""A turn ends early after this time, if steps are long."""
TURNS = 2
"""Turns of each of the two numbers in a trial."""
LONG_STEP_S = 0.1
"""A turn's first step wakes threads and is not counted, unless it takes at least this long."""
RECENT_STEPS = 8
PAUSE_STEPS = 64
"""Steps until the next trial; doubled after each one without a change, to `MOST_PAUSE_STEPS`."""
MOST_PAUSE_STEPS = 256
MORE_GAIN = 0.93
"""Maximum time, relative to fewer threads, at which more threads are worth their cores."""
HOPELESS = 1.15
"""A trial is aborted if the challenger's best step takes this many times the usual."""
SLOWER = 1.33
"""A slowdown by this factor since the last trial starts another one."""
IDLE_SHARE = 0.5
"""More threads are tried only if this fraction of each additional core is idle."""


class ThreadTuner:
    """Chooses `threads` for the next step from the times given to `note`.

    Not thread-safe.
    """

    def __init__(
        self,
        counts: Sequence[int],
        idle_cores: Callable[[], float],
        *,
        start: int | None = None,
    ) -> None:
        """`counts` ascend. `start` is the number tuned for a similar size; without it, starts with
        as many as `idle_cores` reports free plus the one in use, and begins a trial at once."""
        assert counts
        assert list(counts) == sorted(set(counts))
        self._counts = counts
        self._idle_cores = idle_cores
        self._at = self._nearest(start if start is not None else 1 + round(idle_cores()))
        self._trial: _Trial | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._usual_s: float | None = None
        self._pause = self._left = PAUSE_STEPS
        self._downwards = True
        self._settled = start is not None or len(counts) == 1
        if not self._settled:
            self._begin()

    @property
    def threads(self) -> int:
        at = self._at if self._trial is None else self._trial.at
        return self._counts[at]

    @property
    def settled(self) -> bool:
        """Whether the first trials have ended."""
        return self._settled

    def note(self, threads: int, seconds: float, tokens: int = 1) -> None:
        """Record that a step of `tokens` tokens took `seconds` on `threads`."""
        if threads != self.threads:
            return
        trial = self._trial
        if trial is None:
            self._recent.append(seconds / tokens)
            self._left -= 1
            if self._is_slower():
                self._pause, self._left, self._downwards = PAUSE_STEPS, 0, True
            if self._left <= 0:
                self._begin()
            return
        if trial.note(seconds, tokens) and (trial.is_over or self._is_hopeless(trial)):
            self._end(trial)

    def _nearest(self, count: int) -> int:
        return max((at for at, one in enumerate(self._counts) if one <= count), default=0)

    def _is_slower(self) -> bool:
        """Whether steps have slowed down, so that fewer threads may help. False at the minimum."""
        if self._at == 0 or self._usual_s is None or len(self._recent) < RECENT_STEPS:
            return False
        return typical(self._recent) > SLOWER * self._usual_s

    def _begin(self) -> None:
        """Start a trial of more or fewer threads, alternating, where possible."""
        down, up = self._at > 0, self._has_room()
        if down or up:
            downwards = down and (self._downwards or not up)
            self._downwards = not downwards
            self._trial = _Trial(self._at, self._at + (-1 if downwards else 1))
        else:
            self._left, self._settled = PAUSE_STEPS, True

    def _has_room(self) -> bool:
        if self._at + 1 == len(self._counts):
            return False
        more = self._counts[self._at + 1] - self._counts[self._at]
        return self._idle_cores() >= IDLE_SHARE * more

    def _is_hopeless(self, trial: _Trial) -> bool:
        """Whether the challenger is so slow that its trial can be aborted."""
        # Samples of the running trial are newer than `_recent`.
        usual = trial.samples[trial.holder] or list(self._recent)
        mine = trial.samples[trial.challenger]
        return bool(usual) and min(mine) > HOPELESS * typical(usual)

    def _end(self, trial: _Trial) -> None:
        holder, challenger = (trial.samples[at] for at in (trial.holder, trial.challenger))
        upwards = trial.challenger > trial.holder
        share = MORE_GAIN if upwards else 1.0
        won = trial.is_over and typical(challenger) <= share * typical(holder)
        if kept := challenger if won else holder or self._recent:
            self._usual_s = typical(kept)
        self._trial = None
        self._recent.clear()
        if not won:
            self._left, self._pause = self._pause, min(2 * self._pause, MOST_PAUSE_STEPS)
            self._settled = True
            return
        self._at, self._pause = trial.challenger, PAUSE_STEPS
        further = self._at + 1 if upwards else self._at - 1
        if self._has_room() if upwards else further >= 0:
            self._trial = _Trial(self._at, further)
        else:
            self._left, self._settled = self._pause, True


class _Trial:
    """Alternating turns of two numbers of threads, the challenger's first."""

    def __init__(self, holder: int, challenger: int) -> None:
        self.holder = holder
        self.challenger = challenger
        self.at = challenger
        self.samples: dict[int, list[float]] = {holder: [], challenger: []}
        self._blocks = self._steps = 0
        self._seconds = 0.0

    @property
    def is_over(self) -> bool:
        return self._blocks == 2 * TURNS

    def note(self, seconds: float, tokens: int) -> bool:
        """Record a step of the current number; return whether its turn is over."""
        self._steps += 1
        self._seconds += seconds
        samples = self.samples[self.at]
        if self._steps == 1 and seconds < LONG_STEP_S:
            return False
        samples.append(seconds / tokens)
        if self._steps <= BLOCK_STEPS and self._seconds < BLOCK_S:
            return False
        self._blocks += 1
        self._steps, self._seconds = 0, 0.0
        self.at = self.holder if self.at == self.challenger else self.challenger
        return True


def typical(samples: Sequence[float] | deque[float]) -> float:
    """Return the mean of samples clipped at twice their median.

    Beside a busy process some steps on several threads wait for a time slice: the median hides
    that, and the plain mean overrates a single outlier.
    """
    most = 2 * median(samples)
    return fmean(min(sample, most) for sample in samples)
