"""Swarms for tests: nodes that share this process, each with a p2pd of its own, or daemons.

Both join through the first node, on loopback, with identities in a folder of the test's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nesa_node.cli.services.local_swarm import LOOPBACK, LocalNode, start_node, wait_until_serving
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.server.node.daemon import serve_node
from nesa_node.server.node.move_limiter import MoveLimiter
from nesa_node.server.shards.member import serve_shards
from nesa_node.swarm.p2p.p2pd import remove_stale_directories

READY_S = 120.0
T = TypeVar("T")


def thirds(num_blocks: int) -> list[Span]:
    cuts = [num_blocks * i // 3 for i in range(4)]
    return [Span(a, b) for a, b in itertools.pairwise(cuts)]


class NodeThread:
    """An event loop in a thread of its own, for nodes that share this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nodes", daemon=True)
        self._stopping: list[asyncio.Event] = []
        self._running: list[Any] = []

    def start(self, config: NodeConfig, moves: MoveLimiter | None = None) -> None:
        stopping = asyncio.Event()
        self._stopping.append(stopping)
        self._running.append(
            asyncio.run_coroutine_threadsafe(
                serve_node(config, stopping, moves)
                if config.shards_gib is None
                else serve_shards(config, stopping),
                self._loop,
            )
        )

    def start_and_wait(self, config: NodeConfig) -> tuple[str, ...]:
        """Start a node; returns its addresses once it serves."""
        self.start(config)
        assert config.ready_file is not None
        deadline = time.monotonic() + READY_S
        while not config.ready_file.exists():
            self.check()
            assert time.monotonic() < deadline, f"{config.ready_file.stem}: the node does not serve"
            time.sleep(0.02)
        return tuple(json.loads(config.ready_file.read_text())["addresses"])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, in the nodes' thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(READY_S)

    def stop(self) -> None:
        """Ask every node to leave."""
        for stopping in self._stopping:
            self._loop.call_soon_threadsafe(stopping.set)

    def check(self) -> None:
        """Raise what a node raised."""
        for running in self._running:
            if running.done():
                running.result()

    def __enter__(self) -> NodeThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for running in self._running:
            running.exception(READY_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def in_process_swarm(
    model: Path, spans: Sequence[Span], folder: Path, **options: Any
) -> Iterator[tuple[str, ...]]:
    """Nodes in this process; yields the addresses to join through."""
    with NodeThread() as thread:
        addresses: tuple[str, ...] = ()
        for number, span in enumerate(spans):
            config = NodeConfig.model_validate(
                {
                    "model": str(model),
                    "block_indices": span,
                    "initial_peers": addresses,
                    "host_maddrs": (LOOPBACK,),
                    "identity_path": folder / f"node-{number}.key",
                    "ready_file": folder / f"ready-{number}.json",
                    "torch_dtype": "float32",
                    "device": "cpu",
                    "attn_cache_tokens": 32_768,
                    "drain_timeout_s": 2,
                }
                | options
            )
            found = thread.start_and_wait(config)
            addresses = addresses or found
        yield addresses


class Daemons:
    """Real `nesa-node run` processes that tests start, kill and stop."""

    def __init__(self, stack: ExitStack, model: Path, folder: Path, flags: Sequence[str]) -> None:
        self.nodes: list[LocalNode] = []
        self._stack = stack
        self._model = model
        self._folder = folder
        self._flags = ("--torch-dtype", "float32", "--threads", "1", *flags)
        self._count = 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the first node that runs."""
        return next(node for node in self.nodes if node.process.poll() is None).addresses

    def start(self, span: Span, *flags: str) -> LocalNode:
        """Start a daemon and wait until it serves."""
        return self.start_all([span], *flags)[0]

    def start_all(self, spans: Sequence[Span], *flags: str) -> list[LocalNode]:
        """Start daemons; the very first one alone, the others at once."""
        if not self.nodes:
            return [self._wait(self._launch(spans[0], flags)), *self.start_all(spans[1:], *flags)]
        launched = [self._launch(span, flags) for span in spans]
        return [self._wait(node) for node in launched]

    def kill(self, node: LocalNode) -> None:
        """As a power cut would: no goodbye."""
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(10)

    def terminate(self, node: LocalNode) -> None:
        """Ask it to leave; it drains on its own time."""
        node.process.send_signal(signal.SIGTERM)

    def log(self, node: LocalNode) -> str:
        return node.log_path.read_text(encoding="utf-8", errors="replace")

    def _launch(self, span: Span, flags: Sequence[str]) -> Any:
        self._count += 1
        joining = ("--initial-peers", *self.addresses) if self.nodes else ()
        return start_node(
            self._stack,
            self._model,
            f"node-{self._count}",
            span,
            self._folder,
            (*joining, *self._flags, *flags),
        )

    def _wait(self, launched: Any) -> LocalNode:
        node = wait_until_serving(launched, time.monotonic() + READY_S)
        self.nodes.append(node)
        return node


@contextmanager
def daemons(model: Path, folder: Path, *flags: str) -> Iterator[Daemons]:
    """Daemons of `model`; whatever still runs at the end is stopped."""
    try:
        with ExitStack() as stack:
            yield Daemons(stack, model, folder, flags)
    finally:
        # A killed daemon cannot remove its runtime directory; the next one to start would.
        remove_stale_directories(Path(tempfile.gettempdir()))
