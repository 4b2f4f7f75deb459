"""A gateway as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nesa_node.cli.services.local_swarm import stop_processes

READY_S = 120.0


@dataclass(frozen=True)
class GatewayProcess:
    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def gateway_process(
    model: Path | None, folder: Path, addresses: Sequence[str], *flags: str
) -> Iterator[GatewayProcess]:
    """`nesa-node api`, on any port of loopback, until the context ends."""
    ready, log_path = folder / "gateway.json", folder / "gateway.log"
    argv = [sys.executable, "-m", "nesa_node", "api"]
    argv += [] if model is None else ["--model", str(model)]
    argv += ["--initial-peers", *addresses, "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    argv += ["--keys-path", str(folder / "keys.json"), "--dtype", "float32", "--threads", "1"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*argv, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.05)
        url = json.loads(ready.read_text(encoding="utf-8"))["url"]
        yield GatewayProcess(url, log_path, process)
    finally:
        stop_processes([process])
