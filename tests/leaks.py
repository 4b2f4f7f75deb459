"""What this test run has open at a moment: processes, listening ports, temporary files."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

RUN_VARIABLE = "NN_TEST_RUN"
"""Set in the environment of the run: finds processes that lost their parent (a p2pd, say)."""

_OF_OTHERS: set[int] = set()
"""Live processes known as somebody else's. They are most, there are two looks at each test, and
none can become ours: its environment is what it started with, and its parents are not ours.
"""

_OF_PYTHON_ITSELF = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Immutable picture; two of them are compared."""

    processes: frozenset[int]
    ports: frozenset[tuple[str, int]]
    files: frozenset[str]

    @classmethod
    def now(cls, tmp: Path) -> Leftovers:
        processes = _processes_of_this_run()
        return cls(
            processes=frozenset(process.pid for process in processes),
            ports=frozenset(port for p in [psutil.Process(), *processes] for port in _ports(p)),
            files=frozenset(entry.name for entry in tmp.iterdir()),
        )

    def wait_until_gone(self, tmp: Path, timeout_s: float) -> list[str]:
        """What exists beyond `self` even after `timeout_s`, in words.

        Ends such processes and deletes such files, so that only the guilty test fails.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = Leftovers.now(tmp)
            more = now.processes - self.processes, now.ports - self.ports, now.files - self.files
            if not any(more):
                return []
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        processes, ports, files = more
        left = [_end(pid) for pid in sorted(processes)]
        left += [f"listening port {address}:{port}" for address, port in sorted(ports)]
        left += [_delete(tmp / name) for name in sorted(files)]
        return left


def _processes_of_this_run() -> list[psutil.Process]:
    """Live descendants, and live processes that inherited the run's environment."""
    alive = set(psutil.pids())
    _OF_OTHERS.intersection_update(alive)
    found = [_ours(pid) for pid in alive - _OF_OTHERS - {os.getpid()}]
    return [process for process in found if process and _counts(process)]


def _ours(pid: int) -> psutil.Process | None:
    try:
        process, me = psutil.Process(pid), psutil.Process()
        if process.create_time() >= me.create_time():
            if me in process.parents():
                return process
            environ = process.environ()
            if environ.get(RUN_VARIABLE) == os.environ[RUN_VARIABLE]:
                return process
            if not environ:  # it is being replaced by another program: look again
                return None
        _OF_OTHERS.add(pid)
    except (psutil.Error, OSError):
        pass  # gone, a zombie, or another user's
    return None


def _counts(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return not any(word in line for word in _OF_PYTHON_ITSELF)


def _ports(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


def _delete(path: Path) -> str:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return f"temporary file {path}"


def _end(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        words = f"process {pid}: {' '.join(process.cmdline())[:200]}"
        process.kill()
    except psutil.Error:
        return f"process {pid}"
    return words
