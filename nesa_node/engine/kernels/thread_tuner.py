"""Tuner of the number of threads for steps of one size, by trials of a larger and a smaller number.

The fastest number depends on what other processes leave idle: compared with one thread a step on
two takes half as long if two cores are free, and three times as long if one is not, since each
product waits for its slowest thread. So alternatives are tried for a few steps at intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

TURN_STEPS = 3
"""Steps counted per turn of one number of threads."""
MIN_TURN_S = 0.3
"""A turn ends early after this time, if steps are long."""
TURNS_PER_COUNT = 2
"""Turns of each of the two numbers in a trial."""
LONG_STEP_S = 0.1
"""A turn's first step wakes threads and is not counted, unless it takes at least this long."""
RECENT_STEPS = 8
TRIAL_INTERVAL_STEPS = 64
"""Steps until the next trial; doubled after each one without a change, to
`MAX_TRIAL_INTERVAL_STEPS`."""
MAX_TRIAL_INTERVAL_STEPS = 256
MORE_THREADS_MAX_TIME_FRACTION = 0.93
"""Maximum time, relative to fewer threads, at which more threads are worth their cores."""
ABORT_TIME_FACTOR = 1.15
"""A trial is aborted if the challenger's best step takes this many times the usual."""
SLOWDOWN_TIME_FACTOR = 1.33
"""A slowdown by this factor since the last trial starts another one."""
MIN_IDLE_CORE_FRACTION = 0.5
"""More threads are tried only if this fraction of each additional core is idle."""


class ThreadTuner:
    """Chooses `threads` for the next step from the times given to `record_step`.

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
        self._index = self._nearest_index(start if start is not None else 1 + round(idle_cores()))
        self._trial: _Trial | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._reference_s: float | None = None
        self._trial_interval = self._steps_until_trial = TRIAL_INTERVAL_STEPS
        self._tries_fewer_next = True
        self._is_settled = start is not None or len(counts) == 1
        if not self._is_settled:
            self._begin_trial()

    @property
    def threads(self) -> int:
        at = self._index if self._trial is None else self._trial.current
        return self._counts[at]

    @property
    def is_settled(self) -> bool:
        """Whether the first trials have ended."""
        return self._is_settled

    def record_step(self, threads: int, seconds: float, tokens: int = 1) -> None:
        """Record that a step of `tokens` tokens took `seconds` on `threads`."""
        if threads != self.threads:
            return
        trial = self._trial
        if trial is None:
            self._recent.append(seconds / tokens)
            self._steps_until_trial -= 1
            if self._has_slowed_down():
                self._trial_interval, self._steps_until_trial, self._tries_fewer_next = (
                    TRIAL_INTERVAL_STEPS,
                    0,
                    True,
                )
            if self._steps_until_trial <= 0:
                self._begin_trial()
            return
        if trial.record_step(seconds, tokens) and (trial.is_over or self._is_clearly_slower(trial)):
            self._end_trial(trial)

    def _nearest_index(self, count: int) -> int:
        return max((at for at, one in enumerate(self._counts) if one <= count), default=0)

    def _has_slowed_down(self) -> bool:
        """Whether steps have slowed down, so that fewer threads may help. False at the minimum."""
        if self._index == 0 or self._reference_s is None or len(self._recent) < RECENT_STEPS:
            return False
        return clipped_mean(self._recent) > SLOWDOWN_TIME_FACTOR * self._reference_s

    def _begin_trial(self) -> None:
        """Start a trial of more or fewer threads, alternating, where possible."""
        down, up = self._index > 0, self._has_idle_cores()
        if down or up:
            downwards = down and (self._tries_fewer_next or not up)
            self._tries_fewer_next = not downwards
            self._trial = _Trial(self._index, self._index + (-1 if downwards else 1))
        else:
            self._steps_until_trial, self._is_settled = TRIAL_INTERVAL_STEPS, True

    def _has_idle_cores(self) -> bool:
        if self._index + 1 == len(self._counts):
            return False
        more = self._counts[self._index + 1] - self._counts[self._index]
        return self._idle_cores() >= MIN_IDLE_CORE_FRACTION * more

    def _is_clearly_slower(self, trial: _Trial) -> bool:
        """Whether the challenger is so slow that its trial can be aborted."""
        # Samples of the running trial are newer than `_recent`.
        usual = trial.samples[trial.incumbent] or list(self._recent)
        mine = trial.samples[trial.challenger]
        return bool(usual) and min(mine) > ABORT_TIME_FACTOR * clipped_mean(usual)

    def _end_trial(self, trial: _Trial) -> None:
        holder, challenger = (trial.samples[at] for at in (trial.incumbent, trial.challenger))
        upwards = trial.challenger > trial.incumbent
        share = MORE_THREADS_MAX_TIME_FRACTION if upwards else 1.0
        won = trial.is_over and clipped_mean(challenger) <= share * clipped_mean(holder)
        if kept := challenger if won else holder or self._recent:
            self._reference_s = clipped_mean(kept)
        self._trial = None
        self._recent.clear()
        if not won:
            self._steps_until_trial, self._trial_interval = (
                self._trial_interval,
                min(2 * self._trial_interval, MAX_TRIAL_INTERVAL_STEPS),
            )
            self._is_settled = True
            return
        self._index, self._trial_interval = trial.challenger, TRIAL_INTERVAL_STEPS
        further = self._index + 1 if upwards else self._index - 1
        if self._has_idle_cores() if upwards else further >= 0:
            self._trial = _Trial(self._index, further)
        else:
            self._steps_until_trial, self._is_settled = self._trial_interval, True


class _Trial:
    """Alternating turns of two numbers of threads, the challenger's first."""

    def __init__(self, incumbent: int, challenger: int) -> None:
        self.incumbent = incumbent
        self.challenger = challenger
        self.current = challenger
        self.samples: dict[int, list[float]] = {incumbent: [], challenger: []}
        self._turns = self._steps = 0
        self._seconds = 0.0

    @property
    def is_over(self) -> bool:
        return self._turns == 2 * TURNS_PER_COUNT

    def record_step(self, seconds: float, tokens: int) -> bool:
        """Record a step of the current number; return whether its turn is over."""
        self._steps += 1
        self._seconds += seconds
        samples = self.samples[self.current]
        if self._steps == 1 and seconds < LONG_STEP_S:
            return False
        samples.append(seconds / tokens)
        if self._steps <= TURN_STEPS and self._seconds < MIN_TURN_S:
            return False
        self._turns += 1
        self._steps, self._seconds = 0, 0.0
        self.current = self.incumbent if self.current == self.challenger else self.challenger
        return True


def clipped_mean(samples: Sequence[float] | deque[float]) -> float:
    """Return the mean of samples clipped at twice their median.

    Beside a busy process some steps on several threads wait for a time slice: the median hides
    that, and the plain mean overrates a single outlier.
    """
    most = 2 * median(samples)
    return fmean(min(sample, most) for sample in samples)
