"""A gateway of its own process, over three daemons of the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from nesa_node.cli.services.local_swarm import (
    LocalNode,
    local_swarm,
    start_node,
    stop_processes,
    wait_until_serving,
)
from nesa_node.core.ids import Span

MODEL = "SmolLM2-135M-Instruct"
SPANS = (Span(0, 10), Span(10, 20), Span(20, 30))
FLAGS = ("--torch-dtype", "float32", "--threads", "1", "--record-ttl-s", "10")
"""A node that was killed is to be missed soon."""
READY_S = 300
"""A busy machine takes minutes for what takes seconds."""


@dataclass(frozen=True, slots=True)
class LiveGateway:
    """`url` ends in /v1. Who is `limited` may ask once a minute; `revoked` was a key once."""

    url: str
    key: str
    limited: str
    limited_npm: str
    revoked: str
    nodes: tuple[LocalNode, ...]
    model: Path
    folder: Path

    @contextmanager
    def substitute(self, span: Span) -> Iterator[None]:
        """One more node, which holds `span`."""
        with ExitStack() as stack:
            joining = ("--initial-peers", *self.nodes[0].addresses, *FLAGS)
            node = start_node(stack, self.model, "substitute", span, self.folder, joining)
            wait_until_serving(node, time.monotonic() + READY_S)
            yield


@contextmanager
def live_gateway(model: Path, folder: Path) -> Iterator[LiveGateway]:
    """Start all and stop all. `folder` takes keys, logs and ready files."""
    store = folder / "keys.json"
    key = _key(store, "tests")
    once = ("--requests-per-min", "1")
    limited, limited_npm = (_key(store, name, *once) for name in ("limited", "limited-npm"))
    revoked = _key(store, "revoked")
    _nesa_node("keys", "revoke", "revoked", "--keys-path", str(store))
    with (
        local_swarm(model, SPANS, folder, flags=FLAGS, ready_timeout_s=READY_S) as nodes,
        _gateway(model, folder, nodes[0].addresses, store) as url,
    ):
        # A model joins the swarm with the first request for it, by a process of its own: a test
        # ends with those it began with.
        _ask_once(url, key)
        yield LiveGateway(
            url=f"{url}/v1",
            key=key,
            limited=limited,
            limited_npm=limited_npm,
            revoked=revoked,
            nodes=tuple(nodes),
            model=model,
            folder=folder,
        )


@contextmanager
def _gateway(model: Path, folder: Path, addresses: Sequence[str], store: Path) -> Iterator[str]:
    ready, log_path = folder / "gateway.json", folder / "gateway.log"
    command = [sys.executable, "-m", "nesa_node", "api", "--model", str(model)]
    command += ["--initial-peers", *addresses]
    command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready), "--keys-path", str(store)]
    command += ["--torch-dtype", "float32", "--threads", "1"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            log_text = log_path.read_text(encoding="utf-8", errors="replace")
            assert process.poll() is None, log_text
            assert time.monotonic() < deadline, log_text
            time.sleep(0.05)
        yield json.loads(ready.read_text(encoding="utf-8"))["url"]
    finally:
        stop_processes([process])


def _ask_once(url: str, key: str) -> None:
    answer = httpx.post(
        f"{url}/v1/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": MODEL, "prompt": "Hello", "max_tokens": 1},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text


def _key(store: Path, name: str, *limits: str) -> str:
    return _nesa_node("keys", "add", name, *limits, "--keys-path", str(store)).strip()


def _nesa_node(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nesa_node", *argv],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
