"""Checks of this machine for `nesa-node doctor`. Each yields findings; none raises."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from nesa_node import __version__

Level = Literal["ok", "warn", "fail"]
PACKAGES = ("torch", "transformers", "hivemind")
FAST_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_GIB = 2**30
_EARLIEST = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do, shown unless the level is "ok"."""

    level: Level
    subject: str
    detail: str
    advice: str = ""


def check_versions() -> Iterator[Finding]:
    text = f"nesa-node {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("ok", "python", text)
    for package in PACKAGES:
        try:
            yield Finding("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding("fail", package, "not installed", "reinstall nesa-node with pip")


def check_p2pd(path: Path) -> Iterator[Finding]:
    """Check libp2p's daemon at `path`, where hivemind installs it."""
    advice = "reinstall hivemind; it ships the daemon for Linux on x86-64"
    if not path.is_file():
        yield Finding("fail", "p2pd", f"not found at {path}", advice)
    elif not os.access(path, os.X_OK):
        yield Finding("fail", "p2pd", f"{path} may not be executed", f"chmod +x {path}")
    else:
        yield Finding("ok", "p2pd", str(path))


def check_devices() -> Iterator[Finding]:
    import torch

    flags = sorted(_cpu_flags() & set(FAST_CPU_FLAGS))
    words = f"{psutil.cpu_count(logical=False) or '?'} cores, {psutil.cpu_count()} threads, "
    words += f"torch uses {torch.get_num_threads()}"
    if flags:
        yield Finding("ok", "cpu", f"{words}; {', '.join(flags)}")
    else:
        advice = "matrix products will be slow; let the virtual machine use the host's CPU features"
        yield Finding("warn", "cpu", f"{words}; no wide vector instructions found", advice)
    if not torch.cuda.is_available():
        yield Finding("ok", "gpu", "none found (CUDA); blocks run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(
            "ok", "gpu", f"cuda:{index} {name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return set(flags[0].partition(":")[2].split()) if flags else set()


def check_memory_and_disk(cache_dir: Path) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    if memory.available > 2 * _GIB:
        yield Finding("ok", "memory", text)
    else:
        yield Finding("warn", "memory", text, "close other programs, or serve few blocks")
    folder = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        advice = "choose another folder with --cache-dir"
        yield Finding("fail", "disk", f"{cache_dir} cannot be written", advice)
        return
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free for {cache_dir}"
    if free > 5 * _GIB:
        yield Finding("ok", "disk", text)
    else:
        yield Finding("warn", "disk", text, "free some space, or set --cache-dir, --max-disk-gib")


def check_clock() -> Iterator[Finding]:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() > _EARLIEST:
        yield Finding("ok", "clock", now)
    else:
        yield Finding("fail", "clock", now, "set the clock: records with a wrong time are dropped")


def check_listening() -> Iterator[Finding]:
    """Check that a port can be opened on all interfaces, for IPv4 and IPv6."""
    for name, family, address in (
        ("ipv4", socket.AF_INET, "0.0.0.0"),
        ("ipv6", socket.AF_INET6, "::"),
    ):
        try:
            with socket.create_server((address, 0), family=family):
                yield Finding("ok", name, "can listen")
        except OSError as error:
            advice = f"leave {name} out of --host-maddrs if this machine has none"
            yield Finding("warn", name, f"cannot listen: {error.strerror}", advice)


def worst(findings: Sequence[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"
