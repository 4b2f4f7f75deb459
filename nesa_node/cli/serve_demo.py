"""The gateway of a demo's swarm, and the words that show how to use it."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nesa_node.cli.local_swarm import stop_nodes
from nesa_node.core.errors import SwarmError
from nesa_node.core.http_address import HttpAddress

USUAL = HttpAddress("127.0.0.1", 8000)
_READY_S = 60.0
_POLL_S = 0.1


def serve_until_stopped(
    model: Path, initial_peers: Sequence[str], folder: Path, question: str
) -> None:
    """Run a gateway until Ctrl-C, and say where. `folder` takes its log and its ready file.

    Raises `SwarmError` with the end of its log if it does not come to serve, or ends by itself.
    """
    ready, log_path = folder / "gateway.json", folder / "gateway.log"
    command = [sys.executable, "-m", "nesa_node", "api", "--while-stdin"]
    command += ["--model", str(model), "--initial-peers", *initial_peers, "--threads", "1"]
    command += ["--torch-dtype", "float32", "--ready-file", str(ready)]
    command += ["--listen", str(_free_address()), "--keys-path", str(folder / "keys.json")]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal must reach us alone: we stop it before the daemons.
            start_new_session=True,
        )
    try:
        url = _wait_until_serving(process, ready, log_path)
        print(_words(url, model.name, question), flush=True)
        process.wait()
        raise SwarmError(f"the gateway has ended:\n{_tail(log_path)}")
    finally:
        stop_nodes([process])
        if process.stdin is not None:
            process.stdin.close()


def _free_address() -> HttpAddress:
    """The usual one, or any other port where that is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((USUAL.host, USUAL.port))
        except OSError:
            return HttpAddress(USUAL.host, 0)
    return USUAL


def _wait_until_serving(process: subprocess.Popen[bytes], ready: Path, log_path: Path) -> str:
    deadline = time.monotonic() + _READY_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SwarmError(f"the gateway did not come to serve:\n{_tail(log_path)}")
        time.sleep(_POLL_S)
    url: str = json.loads(ready.read_text(encoding="utf-8"))["url"]
    return url


def _words(url: str, name: str, question: str) -> str:
    # As the demo asked. A model this small that draws its words may not find an end.
    messages = [{"role": "user", "content": question}]
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 64}
    return (
        f"\n  gateway       {url}/v1  (OpenAI's API, model {name})\n"
        f"  dashboard     {url}/\n\n"
        f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n\n"
        "  Ctrl-C stops it and the daemons."
    )


def _tail(path: Path, lines: int = 15) -> str:
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join(f"  {line}" for line in text)
