"""Tuned number of torch's threads for each size of step, by trials of a larger and a smaller one.

The fastest number depends on what other processes leave idle: compared with one thread a step on
two takes half as long if two cores are free, and three times as long if one is not, since each
product waits for its slowest thread. So alternatives are tried for a few steps at intervals.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import psutil
import torch

from nesa_node.engine.kernels.machine_code import set_num_threads

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


BACKGROUND_NICENESS = 15
"""Of threads whose work can wait: beside one that decodes they get a thirtieth of a core's time."""


def lower_priority(niceness: int = BACKGROUND_NICENESS) -> None:
    """Of the calling thread, on Linux; elsewhere a process has one priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


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
        first = start if start is not None else 1 + round(idle_cores())
        self._index = max(sum(count <= first for count in counts) - 1, 0)
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
        return self._counts[self._index if self._trial is None else self._trial.current]

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
                self._trial_interval, self._steps_until_trial = TRIAL_INTERVAL_STEPS, 0
                self._tries_fewer_next = True
            if self._steps_until_trial <= 0:
                self._begin_trial()
            return
        if trial.record_step(seconds, tokens) and (trial.is_over or self._is_clearly_slower(trial)):
            self._end_trial(trial)

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
            self._steps_until_trial = self._trial_interval
            self._trial_interval = min(2 * self._trial_interval, MAX_TRIAL_INTERVAL_STEPS)
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
        self.incumbent, self.challenger = incumbent, challenger
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


T = TypeVar("T")

StepSize = tuple[int, int]
"""Bit length of the number of tokens, and number of blocks: time per token is about equal."""

MIN_IDLE_WINDOW_S = 0.2
"""Shortest interval to measure idle time over: the system counts it in hundredths of a second."""
MAX_CORES = 1 << 16
_CGROUP_ROOT = Path("/sys/fs/cgroup")

_is_fixed = False


def fix_threads(count: int) -> None:
    """Use exactly `count` of torch's threads in this process, without tuning."""
    global _is_fixed  # global like torch's own setting
    torch.set_num_threads(count)
    _is_fixed = True


class ThreadController:
    """Runs steps on the fastest number of threads among 1, 2, 4 ... and torch's maximum.

    Thread-safe. Results of machine code do not depend on the number, so that decoded tokens do not;
    the last bits of torch's own operations may.
    """

    def __init__(self) -> None:
        self._tuners: dict[StepSize, ThreadTuner] = {}
        self._max_threads = 0
        self._lock = threading.Lock()

    def run(self, step: Callable[[], T], tokens: int, blocks: int = 0) -> T:
        """Return the result of `step()`, a step of `tokens` tokens through `blocks` blocks."""
        max_threads = 1 if _is_fixed else torch.get_num_threads()
        if max_threads == 1:
            return step()
        with self._lock:
            tuner = self._get_tuner((tokens.bit_length(), blocks), max_threads)
            count = tuner.threads
        if count != max_threads:
            set_num_threads(count)
        started = time.perf_counter()
        try:
            result = step()
        finally:
            ended = time.perf_counter()
            if count != max_threads:
                # Restore the calling thread's setting, which the caller's own code may rely on.
                set_num_threads(max_threads)
        with self._lock:
            tuner.record_step(count, ended - started, tokens)
        return result

    def is_settled(self, tokens: int, blocks: int = 0) -> bool:
        """Whether the first trials for steps of that size are over."""
        with self._lock:
            tuner = self._tuners.get((tokens.bit_length(), blocks))
        return tuner.is_settled if tuner is not None else _is_fixed or torch.get_num_threads() == 1

    def _get_tuner(self, size: StepSize, max_threads: int) -> ThreadTuner:
        if max_threads != self._max_threads:
            self._tuners.clear()
            self._max_threads = max_threads
        tuner = self._tuners.get(size)
        if tuner is None:
            counts = list_thread_counts(max(min(max_threads, cpu_quota()), 1))
            tuner = ThreadTuner(counts, idle_cores, start=self._nearest_threads(size))
            self._tuners[size] = tuner
        return tuner

    def _nearest_threads(self, size: StepSize) -> int | None:
        """Return the number of threads tuned for the most similar size; None if there is none."""
        known = [other for other, tuner in self._tuners.items() if tuner.is_settled]
        if not known:
            return None
        tokens, blocks = size
        like = min(known, key=lambda one: (abs(one[0] - tokens), abs(one[1] - blocks)))
        return self._tuners[like].threads


def list_thread_counts(max_threads: int) -> list[int]:
    """Return 1, 2, 4 ... and `max_threads`."""
    return sorted({max_threads, *(1 << bit for bit in range(max_threads.bit_length()))})


def _read_idle_s() -> float:
    """Idle seconds of all usable cores together since the machine started."""
    times = psutil.cpu_times(percpu=True)
    return float(sum(times[core].idle for core in _usable_cores(len(times))))


def _usable_cores(count: int) -> set[int]:
    """Numbers of the cores, of `count`, on which this process may run."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not mine or max(mine) >= count:  # a container that renumbers cores
        mine = set(range(count))
    return mine


QUIET_SHARE = 0.15
"""Share of the cores that other processes use on a machine that counts as quiet."""


class IdleCores:
    """Average number of idle cores of this process since the last reading."""

    def __init__(
        self,
        idle_s: Callable[[], float] = _read_idle_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s`: idle seconds of all cores together since the machine started."""
        self._idle_s, self._clock = idle_s, clock
        self._last_reading = clock(), idle_s()
        self._cores = 0.0

    def __call__(self) -> float:
        now, before = self._clock(), self._last_reading
        if now - before[0] >= MIN_IDLE_WINDOW_S:
            self._last_reading = now, self._idle_s()
            self._cores = max(self._last_reading[1] - before[1], 0.0) / (now - before[0])
        return self._cores

    @property
    def num_cores(self) -> int:
        """Cores on which this process may run."""
        return len(_usable_cores(os.cpu_count() or 1))

    def busy_share(self) -> float:
        """Share of the cores that was busy since the last reading."""
        return min(max(1 - self() / self.num_cores, 0.0), 1.0)


idle_cores = IdleCores()
"""Its first reading covers the time since this module was imported (a node's loading)."""


@functools.cache
def cpu_quota() -> int:
    """Return the limit of usable cores by this process's cgroups (version 2 or 1), rounded up."""
    return math.ceil(min(_min_quota(_CGROUP_ROOT, ""), _min_quota(_CGROUP_ROOT / "cpu", "cpu")))


def _min_quota(root: Path, controller: str) -> float:
    folder, quota = root / _read_own_group(controller), float(MAX_CORES)
    while folder.is_relative_to(root):
        quota = min(quota, _read_quota(folder))
        folder = folder.parent
    return quota


def _read_own_group(controller: str) -> str:
    """Return the cgroup path. Lines are `number:controllers:/group`, without controllers in v2."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    parts = [line.split(":", 2) for line in lines]
    mine = (part[2] for part in parts if controller in part[1].split(","))
    return next(mine, "").removeprefix("/")


def _read_quota(folder: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
            quota, period = map(int, text.split())
        except (OSError, ValueError):
            continue  # There is none, or it is "max".
        if quota > 0 and period > 0:  # Version 1 writes -1 for none.
            return quota / period
    return math.inf
