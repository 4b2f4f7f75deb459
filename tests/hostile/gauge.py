"""What a daemon holds at a moment, seen from outside."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gauge:
    """Resident bytes of the daemon and of its p2pd, and the daemon's open files and threads."""

    rss: int
    p2pd_rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Gauge:
        process = psutil.Process(pid)
        children = [child for child in process.children() if "p2pd" in child.name()]
        return cls(
            rss=process.memory_info().rss,
            p2pd_rss=sum(child.memory_info().rss for child in children),
            files=len(os.listdir(f"/proc/{pid}/fd")),
            threads=process.num_threads(),
        )

    def __str__(self) -> str:
        return (
            f"{self.rss / MIB:.1f} MiB, p2pd {self.p2pd_rss / MIB:.1f} MiB, "
            f"{self.files} files, {self.threads} threads"
        )


def settled(pid: int, files: int, timeout_s: float) -> Gauge:
    """The gauge once no more than `files` files are open, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        gauge = Gauge.of(pid)
        if gauge.files <= files or time.monotonic() > deadline:
            return gauge
        time.sleep(0.1)
