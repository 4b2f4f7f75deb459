"""Tuned number of torch's threads for each size of step."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from nesa_node.engine.kernels.machine_code import set_num_threads
from nesa_node.engine.kernels.thread_tuner import ThreadTuner

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
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not mine or max(mine) >= len(times):  # a container that renumbers cores
        mine = set(range(len(times)))
    return float(sum(times[core].idle for core in mine))


class IdleCores:
    """Average number of idle cores of this process since the last reading."""

    def __init__(
        self,
        idle_s: Callable[[], float] = _read_idle_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s`: idle seconds of all cores together since the machine started."""
        self._idle_s = idle_s
        self._clock = clock
        self._last_reading = clock(), idle_s()
        self._cores = 0.0

    def __call__(self) -> float:
        now, before = self._clock(), self._last_reading
        if now - before[0] >= MIN_IDLE_WINDOW_S:
            self._last_reading = now, self._idle_s()
            self._cores = max(self._last_reading[1] - before[1], 0.0) / (now - before[0])
        return self._cores


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
