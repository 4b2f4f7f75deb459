"""Runs steps on the number of torch's threads that makes them fastest here."""

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

from nesa_node.engine.machine_code import use_threads
from nesa_node.engine.thread_tuner import ThreadTuner

T = TypeVar("T")

Size = tuple[int, int]
"""Bits of the number of tokens, and blocks: steps of one size take as long for each token."""

LEAST_WINDOW_S = 0.2
"""Over less than this the system's counters of idle time, in hundredths of a second, say little."""
MOST_CORES = 1 << 16
_CGROUPS = Path("/sys/fs/cgroup")

_fixed = False


def fix_threads(count: int) -> None:
    """Have this process compute on `count` of torch's threads, whatever others would bring."""
    global _fixed  # As torch's own number is the process's.
    torch.set_num_threads(count)
    _fixed = True


class Threads:
    """Chooses for each size of steps among 1, 2, 4 ... and all threads that torch may use here.

    Safe for several threads. No bit of what machine code computes depends on what it chooses, so
    that decoded tokens do not; the last bits of torch's own operations may, as with any setting.
    """

    def __init__(self) -> None:
        self._tuners: dict[Size, ThreadTuner] = {}
        self._most = 0
        self._guard = threading.Lock()

    def run(self, job: Callable[[], T], tokens: int, blocks: int = 0) -> T:
        """The result of `job()`, a step of so many tokens through so many blocks."""
        most = 1 if _fixed else torch.get_num_threads()
        if most == 1:
            return job()
        with self._guard:
            tuner = self._tuner((tokens.bit_length(), blocks), most)
            count = tuner.threads
        if count != most:
            use_threads(count)
        started = time.perf_counter()
        try:
            result = job()
        finally:
            ended = time.perf_counter()
            if count != most:
                # It is the calling thread's number, and a client's caller has uses for its own.
                use_threads(most)
        with self._guard:
            tuner.note(count, ended - started, tokens)
        return result

    def is_settled(self, tokens: int, blocks: int = 0) -> bool:
        """Whether the first trials for steps of that size are over."""
        with self._guard:
            tuner = self._tuners.get((tokens.bit_length(), blocks))
        return tuner.settled if tuner is not None else _fixed or torch.get_num_threads() == 1

    def _tuner(self, size: Size, most: int) -> ThreadTuner:
        if most != self._most:
            self._tuners.clear()
            self._most = most
        tuner = self._tuners.get(size)
        if tuner is None:
            counts = counts_up_to(max(min(most, cpu_quota()), 1))
            tuner = ThreadTuner(counts, idle_cores, start=self._nearest(size))
            self._tuners[size] = tuner
        return tuner

    def _nearest(self, size: Size) -> int | None:
        """What was found for the size that is most like it."""
        known = [other for other, tuner in self._tuners.items() if tuner.settled]
        if not known:
            return None
        tokens, blocks = size
        like = min(known, key=lambda one: (abs(one[0] - tokens), abs(one[1] - blocks)))
        return self._tuners[like].threads


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4 ... and `most`."""
    return sorted({most, *(1 << bit for bit in range(most.bit_length()) if 1 << bit <= most)})


def _idle_s() -> float:
    """Of the cores that this process may use, together, since the machine started."""
    times = psutil.cpu_times(percpu=True)
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not mine or max(mine) >= len(times):  # a container that numbers them anew
        mine = set(range(len(times)))
    return float(sum(times[core].idle for core in mine))


class IdleCores:
    """How many cores of this process had nothing to do since it was last called."""

    def __init__(
        self,
        idle_s: Callable[[], float] = _idle_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s`: of all cores together, since the machine started."""
        self._idle_s = idle_s
        self._clock = clock
        self._before = clock(), idle_s()
        self._cores = 0.0

    def __call__(self) -> float:
        now, before = self._clock(), self._before
        if now - before[0] >= LEAST_WINDOW_S:
            self._before = now, self._idle_s()
            self._cores = max(self._before[1] - before[1], 0.0) / (now - before[0])
        return self._cores


idle_cores = IdleCores()
"""Its first answer is about the time since this module was imported: of loading, for a node."""


@functools.cache
def cpu_quota() -> int:
    """How many cores this process's control groups, of version 2 or 1, let it use at a time."""
    return math.ceil(min(_least_quota(_CGROUPS, ""), _least_quota(_CGROUPS / "cpu", "cpu")))


def _least_quota(root: Path, controller: str) -> float:
    folder, quota = root / _own_group(controller), float(MOST_CORES)
    while folder.is_relative_to(root):
        quota = min(quota, _quota(folder))
        folder = folder.parent
    return quota


def _own_group(controller: str) -> str:
    """Lines are `number:controllers:/group`; version 2 has no controllers there."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    parts = [line.split(":", 2) for line in lines]
    mine = (part[2] for part in parts if controller in part[1].split(","))
    return next(mine, "").removeprefix("/")


def _quota(folder: Path) -> float:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            text = " ".join((folder / name).read_text(encoding="ascii") for name in names)
            quota, period = map(int, text.split())
        except (OSError, ValueError):
            continue  # There is none, or it is "max".
        if quota > 0 and period > 0:  # Version 1 writes -1 for none.
            return quota / period
    return math.inf
