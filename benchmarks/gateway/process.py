"""A gateway of its own process before a swarm's daemons."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import psutil

from nesa_node.cli.services.local_swarm import stop_processes

READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Gateway:
    port: int
    model: str
    """As clients name it."""
    process: subprocess.Popen[bytes]

    def uss_bytes(self) -> int:
        """What it and its p2pds have to themselves."""
        own = psutil.Process(self.process.pid)
        return sum(one.memory_full_info().uss for one in (own, *own.children(recursive=True)))

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def open_gateway(
    model: Path, peers: Sequence[str], log: Path, flags: Sequence[str] = ()
) -> Iterator[Gateway]:
    """Raises `TimeoutError` with the end of its log if it does not come to answer."""
    port = free_port()
    command = [sys.executable, "-m", "nesa_node", "api", "--model", str(model)]
    command += ["--initial-peers", *peers, "--listen", f"127.0.0.1:{port}", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield Gateway(port, _name(port, process, log), process)
    finally:
        stop_processes([process])


def get(port: int, path: str) -> bytes:
    """Raises `OSError` where nobody answers, or not with 200."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ConnectionError(f"{path}: {response.status} {body[:200]!r}")
    return body


def _name(port: int, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return str(json.loads(get(port, "/v1/models"))["data"][0]["id"])
        except (OSError, IndexError):
            time.sleep(0.1)
    raise TimeoutError(f"the gateway does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
