"""Gateway of the demo's swarm, with instructions for trying it and for killing nodes."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nesa_node.cli.services.local_swarm import (
    LocalNode,
    log_tail,
    start_process,
    stop_processes,
)
from nesa_node.core.errors import SwarmError
from nesa_node.core.settings.http_address import HttpAddress
from nesa_node.core.wait_tracking import track_wait

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
