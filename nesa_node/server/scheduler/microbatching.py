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

MAX_MICROBATCHES = 2
MAX_UNGROUPED_SESSIONS = 2
"""At most this many sessions never wait for each other."""
WARMUP_STEPS = 2
"""Steps of each session that pass after a change before samples are taken."""
STEPS_PER_SAMPLE = 2
"""Steps of each session in one sample."""
SAMPLES_PER_TRIAL = 4
"""Samples of one number of microbatches before the numbers are compared or the other is tried."""
MIN_SAMPLES = 8
"""Samples of each number before they are compared: one step may take twice as long as the last."""
MAX_SAMPLES = 16
MAX_TRIAL_S = 10.0
"""A trial ends after this time even without samples, as under constant prefills."""
SAMPLES_VALID_S = 120.0
"""Samples of the unused number are trusted for this long; then some more are taken."""
MAX_STEP_GAP_S = 1.0
MIN_SPEEDUP = 1.03
"""The other number must be this many times as fast to be chosen."""
MAX_TRACKED_CONFIGURATIONS = 256


@dataclass(slots=True)
class _RateSamples:
    """Session steps per second measured with one number of microbatches."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    sampled_at: float = -math.inf

    @property
    def has_enough(self) -> bool:
        return len(self.rates) >= MIN_SAMPLES

    def expire(self, now: float) -> None:
        if now - self.sampled_at > SAMPLES_VALID_S:
            while len(self.rates) > MIN_SAMPLES - SAMPLES_PER_TRIAL:
                self.rates.popleft()


@dataclass(slots=True)
class _MicrobatchTrial:
    """Measurement of one number of microbatches at one number of sessions."""

    sessions: int
    microbatches: int
    began_at: float
    warmed_up: bool = False
    samples: int = 0


class MicrobatchTuner:
    """Choice for sessions that enter a chain here; a result holds for one number of sessions."""

    def __init__(self, fixed: int | None = None) -> None:
        """`fixed` is a constant number of microbatches; None measures."""
        self._fixed = fixed
        self._chosen: dict[int, int] = {}
        self._samples: dict[tuple[int, int], _RateSamples] = {}
        """By number of sessions and microbatches."""
        self._trial: _MicrobatchTrial | None = None
        self._sample_steps = 0
        """Session steps since `_sample_began_at`."""
        self._sample_began_at: float | None = None
        self._last_step_at = -math.inf

    def num_microbatches(self, sessions: int) -> int:
        """The number of microbatches for `sessions`."""
        if self._fixed is not None or sessions <= MAX_UNGROUPED_SESSIONS:
            return self._fixed or MAX_MICROBATCHES
        return self._chosen.get(sessions, MAX_MICROBATCHES)

    def discard_sample(self) -> None:
        """Discard the current sample: other work slowed the steps."""
        self._sample_began_at = None

    def record_steps(self, sessions: int, steps: int, now: float) -> None:
        """Record that `steps` of the `sessions` decoding sessions run one step each at `now`."""
        if self._fixed is not None or sessions <= MAX_UNGROUPED_SESSIONS:
            self._trial = None
            return
        trial, microbatches = self._trial, self.num_microbatches(sessions)
        if trial is None or (trial.sessions, trial.microbatches) != (sessions, microbatches):
            trial = self._trial = _MicrobatchTrial(sessions, microbatches, now)
            self._sample_began_at = None
        if self._sample_began_at is None or now - self._last_step_at > MAX_STEP_GAP_S:
            self._sample_began_at, self._last_step_at, self._sample_steps = now, now, 0
        else:
            self._last_step_at = now
            self._sample_steps += steps
            self._record_sample(trial, now)
        if trial.samples == SAMPLES_PER_TRIAL or now - trial.began_at > MAX_TRIAL_S:
            self._chosen[sessions] = self._choose_next(trial, now)
            trial.samples, trial.began_at = 0, now

    def _record_sample(self, trial: _MicrobatchTrial, now: float) -> None:
        """Add a sample from the steps since `_sample_began_at`, if there are enough."""
        steps = STEPS_PER_SAMPLE if trial.warmed_up else WARMUP_STEPS
        if self._sample_began_at is None or self._sample_steps < steps * trial.sessions:
            return
        if trial.warmed_up:
            seen = self._samples_of(trial.sessions, trial.microbatches)
            seen.rates.append(self._sample_steps / (now - self._sample_began_at))
            seen.sampled_at = now
            trial.samples += 1
        trial.warmed_up = True
        self._sample_began_at, self._sample_steps = now, 0

    def _choose_next(self, trial: _MicrobatchTrial, now: float) -> int:
        """The number of microbatches to use next."""
        other = MAX_MICROBATCHES + 1 - trial.microbatches
        here, there = (
            self._samples_of(trial.sessions, trial.microbatches),
            self._samples_of(trial.sessions, other),
        )
        if trial.samples < SAMPLES_PER_TRIAL:
            # Too few samples in this trial, for example under constant prefills.
            usual = other if there.has_enough else MAX_MICROBATCHES
            return trial.microbatches if here.has_enough else usual
        there.expire(now)
        if not there.has_enough:
            return other
        if not here.has_enough:
            return trial.microbatches
        return (
            other if median(there.rates) > MIN_SPEEDUP * median(here.rates) else trial.microbatches
        )

    def _samples_of(self, sessions: int, microbatches: int) -> _RateSamples:
        if len(self._samples) > MAX_TRACKED_CONFIGURATIONS:
            self._samples.clear()
            self._chosen.clear()
        return self._samples.setdefault((sessions, microbatches), _RateSamples())
