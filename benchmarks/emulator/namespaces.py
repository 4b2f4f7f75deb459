"""Network namespaces without names: each lasts as long as a process is in it or has it open.

Nothing of them is in the file system, so that killed processes leave nothing to be swept.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.emulator.tun import DEVICE

_CLONE_NEWNET = 0x40000000
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_KILL_S = 5.0
_OURS = "/proc/thread-self/ns/net"


def why_unavailable() -> str | None:
    """What this machine or user lacks for an emulated network; None: nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if not _capable(_CAP_NET_ADMIN, _CAP_SYS_ADMIN):
        return "making network namespaces takes root (CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} is missing or not accessible: modprobe tun"
    if shutil.which("ip") is None:
        return "the command ip is missing: install iproute2"
    return None


def _capable(*capabilities: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (effective,) = (line for line in status.splitlines() if line.startswith("CapEff:"))
    bits = int(effective.split()[1], 16)
    return all(bits >> capability & 1 for capability in capabilities)


def new_namespace() -> int:
    """Put this thread into a new network namespace; returns a file descriptor of it."""
    _call("unshare", _CLONE_NEWNET)
    return os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Have this thread in a namespace, given as a file descriptor, for as long as this lasts.

    Sockets that are made meanwhile stay in there, processes and threads that are started too.
    """
    home = os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", namespace, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Bring this thread back at the end, wherever `new_namespace` has put it."""
    home = os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)


def kill_within(namespaces: Collection[int]) -> None:
    """Kill every process, but for the caller's, whose first thread is in one of `namespaces`.

    Returns once there is none, as some may just be starting others, or after 5 s.
    """
    marks = {_mark(os.fstat(namespace)) for namespace in namespaces}
    deadline = time.monotonic() + _KILL_S
    while sum(_kill_if_in(marks, entry) for entry in Path("/proc").iterdir()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _kill_if_in(marks: Collection[tuple[int, int]], entry: Path) -> bool:
    """Whether `entry` of /proc is such a process."""
    if not entry.name.isdigit() or int(entry.name) == os.getpid():
        return False
    try:
        if _mark((entry / "ns" / "net").stat()) not in marks:
            return False
        os.kill(int(entry.name), signal.SIGKILL)
    except OSError:
        # It has just ended.
        return False
    return True


def _mark(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _call(function: str, *arguments: int) -> None:
    # Before Python 3.12 `os` has neither.
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
