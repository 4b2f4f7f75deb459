"""What the processes of a swarm take: time on the processors, memory, bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from nesa_node.cli.services.local_swarm import LocalNode


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time since the processes began, and bytes that loopback has carried.

    Every p2pd counts to `p2pd`. The bytes are those of the whole machine: other traffic on loopback
    counts too; None where the system does not tell.
    """

    client_s: float
    daemons_s: float
    p2pd_s: float
    wire_bytes: int | None

    @classmethod
    def now(cls, nodes: Sequence[LocalNode]) -> Self:
        daemons = [psutil.Process(node.process.pid) for node in nodes]
        children = [child for daemon in daemons for child in daemon.children()]
        served = {daemon.pid for daemon in daemons}
        client = psutil.Process()
        # A client that has joined has a p2pd of its own.
        own = [child for child in client.children() if child.pid not in served and _is_p2pd(child)]
        return cls(
            client_s=_cpu_s(client),
            daemons_s=sum(map(_cpu_s, daemons)),
            p2pd_s=sum(map(_cpu_s, [*children, *own])),
            wire_bytes=_loopback_bytes(),
        )

    def since(self, before: Self) -> dict[str, Any]:
        wire = None
        if self.wire_bytes is not None and before.wire_bytes is not None:
            wire = self.wire_bytes - before.wire_bytes
        return {
            "client_cpu_s": self.client_s - before.client_s,
            "daemons_cpu_s": self.daemons_s - before.daemons_s,
            "p2pd_cpu_s": self.p2pd_s - before.p2pd_s,
            "wire_bytes": wire,
        }


def nodes_cpu_s(nodes: Sequence[LocalNode]) -> float:
    """Processor time of the daemons and their p2pds, since they began."""
    daemons = [psutil.Process(node.process.pid) for node in nodes]
    children = [child for daemon in daemons for child in daemon.children()]
    return sum(map(_cpu_s, [*daemons, *children]))


def memory_of(node: LocalNode) -> dict[str, int]:
    """Bytes that a daemon, its p2pd included, has to itself (USS) and resident in all (RSS).

    The peak is the most that its Python process had resident so far, p2pd not included.
    """
    daemon = psutil.Process(node.process.pid)
    infos = [process.memory_full_info() for process in (daemon, *daemon.children())]
    return {
        "uss_bytes": sum(info.uss for info in infos),
        "rss_bytes": sum(info.rss for info in infos),
        "peak_rss_bytes": node.peak_memory_bytes(),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _is_p2pd(process: psutil.Process) -> bool:
    return "p2pd" in process.name()


def _loopback_bytes() -> int | None:
    counters = psutil.net_io_counters(pernic=True).get("lo")
    return None if counters is None else int(counters.bytes_sent)


def peak_bytes() -> int:
    """The most memory of this process so far (Linux). `getrusage` counts from what its parent had.

    Raises `OSError` on other systems.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not tell the peak of memory")
