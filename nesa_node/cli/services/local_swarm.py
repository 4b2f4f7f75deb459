"""Local swarm of `nesa-node run` daemons on this machine's loopback, for the demo and tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nesa_node.core.errors import SwarmError
from nesa_node.core.span import Span
from nesa_node.core.wait_tracking import track_wait

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A serving daemon. `startup_s` is the time from its start to its ready file."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    ready_file: Path
    peer_id: str
    addresses: tuple[str, ...]
    span: Span
    startup_s: float
    command: tuple[str, ...] = ()
    """Its command line, without initial peers."""

    def peak_memory_bytes(self) -> int:
        """Peak resident memory so far, in bytes (Linux); 0 if unknown."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return 0
        lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(lines[0].split()[1]) * 1024 if lines else 0


@contextmanager
def local_swarm(
    model: Path,
    spans: Sequence[Span],
    folder: Path,
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    ready_timeout_s: float = 120,
) -> Iterator[list[LocalNode]]:
    """Start one daemon per span, the first as bootstrap peer; stop all at the end.

    Keys, logs and ready files are written to `folder`; `environment` is added to the daemons'.
    Raises `SwarmError` with the tail of a daemon's log if it does not serve in time.
    """
    started: list[StartingNode] = []
    more = tuple(flags)
    try:
        for number, span in enumerate(spans, start=1):
            name = f"node-{number}"
            started.append(_launch_node(model, name, span, folder, more, environment=environment))
            if number == 1:
                nodes = [wait_until_serving(started[0], time.monotonic() + ready_timeout_s)]
                more = ("--initial-peers", *nodes[0].addresses, *flags)
        deadline = time.monotonic() + ready_timeout_s
        yield nodes + [wait_until_serving(node, deadline) for node in started[1:]]
    finally:
        stop_processes([node.process for node in started])


@dataclass(frozen=True, slots=True)
class StartingNode:
    name: str
    process: subprocess.Popen[bytes]
    ready_file: Path
    log_path: Path
    started_at_s: float
    command: tuple[str, ...]


def start_node(
    stack: ExitStack,
    model: Path,
    name: str,
    span: Span,
    folder: Path,
    flags: Sequence[str],
    *,
    listen: str = LOOPBACK,
) -> StartingNode:
    """Start a daemon listening at `listen`, which `stack` stops."""
    node = _launch_node(model, name, span, folder, flags, listen=listen)
    stack.callback(stop_processes, [node.process])
    return node


def _launch_node(
    model: Path,
    name: str,
    span: Span,
    folder: Path,
    flags: Sequence[str],
    *,
    listen: str = LOOPBACK,
    environment: Mapping[str, str] | None = None,
) -> StartingNode:
    ready_file, log_path = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "nesa_node", "run", str(model)]
    command += ["--block-indices", str(span), "--public-name", name, "--host-maddrs", listen]
    command += ["--identity-path", str(folder / f"{name}.key"), "--ready-file", str(ready_file)]
    started = time.time()
    # NESA_* settings are for the user's own daemons.
    own = {name: value for name, value in os.environ.items() if not name.startswith("NESA_")}
    process = start_process([*command, *flags], log_path, environment=own | dict(environment or {}))
    return StartingNode(name, process, ready_file, log_path, started, tuple(command))


def start_process(
    command: Sequence[str],
    log_path: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that writes its output to `log_path`."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in the terminal must reach this process only: it stops its children in order.
            start_new_session=True,
        )


def wait_until_serving(node: StartingNode, deadline: float) -> LocalNode:
    with track_wait(f"{node.name} to serve", limit_s=deadline - time.monotonic()):
        while not node.ready_file.exists():
            if node.process.poll() is not None:
                words = f"ended with exit code {node.process.returncode} instead of serving"
                raise SwarmError(f"{node.name} {words}:\n{log_tail(node.log_path)}")
            if time.monotonic() > deadline:
                raise SwarmError(f"{node.name} did not come to serve:\n{log_tail(node.log_path)}")
            time.sleep(_POLL_INTERVAL_S)
    ready = json.loads(node.ready_file.read_text(encoding="utf-8"))
    return LocalNode(
        name=node.name,
        process=node.process,
        log_path=node.log_path,
        ready_file=node.ready_file,
        peer_id=ready["peer_id"],
        addresses=tuple(ready["addresses"]),
        span=Span(*ready["span"]),
        startup_s=node.ready_file.stat().st_mtime - node.started_at_s,
        command=node.command,
    )


def log_tail(path: Path, lines: int = 15) -> str:
    with path.open(encoding="utf-8", errors="replace") as log:
        return "  " + "  ".join(deque(log, maxlen=lines)).rstrip()


def stop_processes(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float = 15) -> None:
    """Send SIGTERM to all processes, wait, and kill those that run on after `timeout_s`."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    with track_wait("daemons to leave the swarm", limit_s=timeout_s):
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
