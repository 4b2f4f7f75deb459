"""Local swarm of `nesa-node run` daemons on loopback, and the demo's gateway to it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import Span
from nesa_node.core.settings.addresses import HttpAddress
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


DEFAULT_ADDRESS = HttpAddress("127.0.0.1", 8000)
_START_TIMEOUT_S = 60.0
_GATEWAY_POLL_INTERVAL_S = 0.1


def serve_until_stopped(
    model: Path, nodes: Sequence[LocalNode], flags: Sequence[str], folder: Path, question: str
) -> None:
    """Run a gateway until Ctrl-C; print its address, and which of `nodes` end or restart.

    Its log and ready file are written to `folder`; `flags` are those of the nodes. Raises
    `SwarmError` with the tail of its log if it does not serve in time, or ends by itself.
    """
    initial_peers = [address for node in nodes for address in node.addresses]
    ready, log_path = folder / "gateway.json", folder / "gateway.log"
    command = [sys.executable, "-m", "nesa_node", "api", "--while-stdin"]
    command += ["--model", str(model), "--initial-peers", *initial_peers, "--threads", "1"]
    command += ["--torch-dtype", "float32", "--ready-file", str(ready)]
    command += ["--listen", str(_choose_address()), "--keys-path", str(folder / "keys.json")]
    process = start_process(command, log_path, stdin=subprocess.PIPE)
    try:
        url = _wait_until_serving(process, ready, log_path)
        print(_usage_text(url, model.name, question, nodes), flush=True)
        supervisor = NodeWatcher(nodes, flags)
        while process.poll() is None:
            for line in supervisor.poll():
                print(line, flush=True)
            time.sleep(_GATEWAY_POLL_INTERVAL_S)
        raise SwarmError(f"the gateway has ended:\n{log_tail(log_path)}")
    finally:
        stop_processes([process])
        if process.stdin is not None:
            process.stdin.close()


class NodeWatcher:
    """Detects nodes that ended and nodes that the user restarted. Starts none itself."""

    def __init__(self, nodes: Sequence[LocalNode], flags: Sequence[str]) -> None:
        self._nodes = nodes
        self._flags = flags
        self._ended: set[str] = set()
        self._restarted: set[str] = set()

    def poll(self) -> Iterator[str]:
        """Yield a line for each node that ended or restarted since the last call."""
        for node in self._nodes:
            if node.name not in self._ended and node.process.poll() is not None:
                self._ended.add(node.name)
                # A killed daemon leaves its ready file; a restarted one writes it again.
                node.ready_file.unlink(missing_ok=True)
                yield self._describe_end(node)
            elif node.name in self._ended - self._restarted and node.ready_file.exists():
                self._restarted.add(node.name)
                yield f"  {node.name} serves again"

    def _describe_end(self, node: LocalNode) -> str:
        alive = [each for each in self._nodes if each.process.poll() is None]
        holders = [each.name for each in alive if each.span == node.span]
        left = f"{', '.join(holders)} goes on with them" if holders else "no other node holds them"
        code = node.process.returncode
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        lines = f"\n  {node.name} has ended ({cause}); it held blocks {node.span}: {left}."
        if not alive:
            return f"{lines} No node is left: stop the demo with Ctrl-C, and start it again.\n"
        peers = [address for each in alive for address in each.addresses]
        command = shlex.join([*node.command, *self._flags, "--initial-peers", *peers])
        return f"{lines} In another terminal this starts it again:\n\n  {command}\n"


def _choose_address() -> HttpAddress:
    """The default address, or any free port if that one is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((DEFAULT_ADDRESS.host, DEFAULT_ADDRESS.port))
        except OSError:
            return HttpAddress(DEFAULT_ADDRESS.host, 0)
    return DEFAULT_ADDRESS


def _wait_until_serving(process: subprocess.Popen[bytes], ready: Path, log_path: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with track_wait("the gateway to serve", limit_s=_START_TIMEOUT_S):
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SwarmError(f"the gateway did not come to serve:\n{log_tail(log_path)}")
            time.sleep(_GATEWAY_POLL_INTERVAL_S)
    url: str = json.loads(ready.read_text(encoding="utf-8"))["url"]
    return url


def _usage_text(url: str, name: str, question: str, nodes: Sequence[LocalNode]) -> str:
    # Greedy, as the demo: with sampling, a model this small may not stop.
    messages = [{"role": "user", "content": question}]
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 64}
    return (
        f"\n  gateway       {url}/v1  (OpenAI's API, model {name})\n"
        f"  dashboard     {url}/\n\n"
        f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n\n"
        f"{_kill_commands(nodes)}"
        "  Ctrl-C stops it and the daemons."
    )


def _kill_commands(nodes: Sequence[LocalNode]) -> str:
    spans = [node.span for node in nodes]
    spare = [node for node in nodes if spans.count(node.span) > 1]
    if not spare:
        return ""
    names = " and ".join(node.name for node in spare)
    kills = "".join(f"  kill -9 {node.process.pid}   # {node.name}\n" for node in spare)
    return f"  {names} hold the same blocks: an answer goes on where one is killed\n\n{kills}\n"
