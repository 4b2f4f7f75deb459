"""Daemons and a client in sites of an emulated network, one each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulator.wan import Wan, open_wan
from benchmarks.options import Options
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags, open_local
from benchmarks.wan.cells import Cell, Chain
from nesa_node.cli.services.local_swarm import LocalNode, start_node, wait_until_serving
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import Span, split_evenly

CLIENT = "client"
CACHE_TOKENS = 8192
_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class WanSwarm:
    wan: Wan
    nodes: list[LocalNode]
    chain: Chain
    client: subprocess.Popen[str]
    client_log: Path

    @property
    def legs(self) -> list[tuple[str, str]]:
        """The pairs of sites that a step crosses, in order."""
        stops = [CLIENT, *(node.name for node in self.nodes), CLIENT]
        return list(pairwise(stops))

    def generate(self, cell: Cell, options: Options, *, local: bool = False) -> dict[str, Any]:
        """What `client.answer` returns, and the bytes that the legs carried meanwhile.

        With `local`, transformers generates alone at the client's site.
        """
        order = {
            "batch": cell.batch,
            "codec": None if local else cell.codec,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "seed": options.seed,
        }
        return self.ask(order, str(asdict(cell)))

    def ask(self, order: dict[str, Any], what: str) -> dict[str, Any]:
        """The client's answer to an order, and the bytes that the legs carried meanwhile."""
        before = self._carried()
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(json.dumps(order) + "\n")
        self.client.stdin.flush()
        line = self.client.stdout.readline()
        if not line:
            log = self.client_log.read_text(encoding="utf-8", errors="replace")
            raise SwarmError(f"the client ended instead of generating {what}:\n{log}")
        found: dict[str, Any] = json.loads(line)
        return found | {"wire_bytes": self._carried() - before}

    def _carried(self) -> int:
        return sum(self.wan.traffic(*leg).bytes for leg in self.legs)


@contextmanager
def open_wan_swarm(folder: Path, options: Options) -> Iterator[WanSwarm]:
    """As many daemons as `options.nodes` begins with, which hold equal parts of the model."""
    checkpoint = open_local(folder)
    spans = split_evenly(checkpoint.num_blocks, options.nodes[0])
    names = [f"node-{number}" for number in range(1, len(spans) + 1)]
    with ExitStack() as stack:
        wan = stack.enter_context(
            open_wan(
                [CLIENT, *names],
                seed=options.seed,
                congestion_control=options.congestion_control,
                sysctls=dict(setting.split("=", 1) for setting in options.sysctls),
            )
        )
        temporary = Path(stack.enter_context(TemporaryDirectory(prefix="nesa-bench-")))
        nodes = start_daemons(stack, wan, folder, dict(zip(names, spans, strict=True)), options)
        settings = {
            "folder": str(folder),
            "peers": [node.addresses[0] for node in nodes],
            "dtype": options.dtype,
        }
        log_path = temporary / "client.log"
        client = stack.enter_context(run_client(wan, settings, log_path))
        hidden_size = checkpoint.config.get_text_config().hidden_size
        chain = Chain(len(nodes), hidden_size, options.torch_dtype.itemsize * 8)
        yield WanSwarm(wan, nodes, chain, client, log_path)


def start_daemons(
    stack: ExitStack, wan: Wan, folder: Path, spans: dict[str, Span], options: Options
) -> list[LocalNode]:
    """The first is the others' bootstrap."""
    temporary = Path(stack.enter_context(TemporaryDirectory(prefix="nesa-bench-")))
    flags = daemon_flags(options, CACHE_TOKENS)
    nodes: list[LocalNode] = []
    starting = []
    for name, span in spans.items():
        more = ["--initial-peers", *nodes[0].addresses] if nodes else []
        listen = f"/ip4/{wan.address(name)}/tcp/0"
        with wan.inside(name):
            started = start_node(
                stack, folder, name, span, temporary, [*flags, *more], listen=listen
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        if nodes:
            starting.append(started)
        else:
            nodes.append(wait_until_serving(started, deadline))
    return nodes + [wait_until_serving(node, deadline) for node in starting]


@contextmanager
def run_client(
    wan: Wan, settings: dict[str, Any], log_path: Path
) -> Iterator[subprocess.Popen[str]]:
    with log_path.open("wb") as log:
        client = wan.popen(
            CLIENT,
            [sys.executable, "-m", "benchmarks.wan.client", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=_ROOT,
            start_new_session=True,
        )
    with client:
        try:
            yield client
        finally:
            # The end of its input is what it ends at.
            try:
                client.communicate(timeout=_PATIENCE_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                client.kill()
