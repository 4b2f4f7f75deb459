"""A swarm whose nodes come and go while a benchmark runs."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.options import Options
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags
from nesa_node.cli.local_swarm import LocalNode, start_node, wait_until_serving
from nesa_node.core.span import Span
from nesa_node.swarm.p2pd import sweep_stale

_EXIT_TIMEOUT_S = 60.0


class ChangingSwarm:
    """`nodes` serve now, by name."""

    def __init__(self, stack: ExitStack, model: Path, folder: Path, flags: Sequence[str]) -> None:
        self.nodes: dict[str, LocalNode] = {}
        self._stack = stack
        self._model = model
        self._folder = folder
        self._flags = flags
        self._count = 0

    def serving(self) -> dict[Span, list[str]]:
        """The names of each span's nodes, in the order of the spans and of their start."""
        spans = sorted({node.span for node in self.nodes.values()})
        return {
            span: [name for name, node in self.nodes.items() if node.span == span] for span in spans
        }

    def start(self, spans: Sequence[Span]) -> list[LocalNode]:
        """Start a node for each span, the very first one alone; wait until all serve."""
        if not self.nodes:
            first, *spans = spans
            self._start([first])
        return self._start(spans)

    def kill(self, name: str) -> None:
        """As a power cut would: no goodbye."""
        process = self.nodes.pop(name).process
        os.kill(process.pid, signal.SIGKILL)
        process.wait(_EXIT_TIMEOUT_S)

    def drain(self, name: str) -> LocalNode:
        """Ask it to leave; it hands its sessions over on its own time."""
        node = self.nodes.pop(name)
        node.process.send_signal(signal.SIGTERM)
        return node

    def wait_until_gone(self, node: LocalNode) -> None:
        node.process.wait(_EXIT_TIMEOUT_S)

    def _start(self, spans: Sequence[Span]) -> list[LocalNode]:
        joining = [address for node in self.nodes.values() for address in node.addresses[:1]]
        flags = ["--initial-peers", *joining] if joining else []
        starting = []
        for span in spans:
            self._count += 1
            name = f"node-{self._count}"
            flags_of = [*flags, *self._flags]
            starting.append(
                start_node(self._stack, self._model, name, span, self._folder, flags_of)
            )
        started = [
            wait_until_serving(node, time.monotonic() + READY_TIMEOUT_S) for node in starting
        ]
        self.nodes |= {node.name: node for node in started}
        return started


@contextmanager
def open_changing_swarm(
    model: Path, options: Options, cache_tokens: int
) -> Iterator[ChangingSwarm]:
    """Without any node yet; whoever still runs at the end is stopped."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="nesa-bench-") as folder,
            ExitStack() as stack,
        ):
            flags = daemon_flags(options, cache_tokens)
            yield ChangingSwarm(stack, model, Path(folder), flags)
    finally:
        # Killed daemons leave their runtime directories to the next one that starts.
        sweep_stale(Path(tempfile.gettempdir()))
