"""A swarm of daemons that is hurt and mended, time and again."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from nesa_node.cli.services.local_swarm import LOOPBACK
from nesa_node.core.ids import Span
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.p2pd import remove_stale_directories
from tests.faults.nursery import POLL_S, Forked, Nursery

READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """A daemon that serves."""

    process: Forked
    peer_id: str
    addresses: tuple[str, ...]
    span: Span
    log_path: Path
    ready_path: Path

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def p2pd(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child


@dataclass(frozen=True, slots=True)
class Starting:
    process: Forked
    log_path: Path
    ready_path: Path


class Bed:
    """Nodes that serve now are in `nodes`. Threads may start and kill nodes."""

    def __init__(self, nursery: Nursery, model: Path, folder: Path) -> None:
        self.model = model
        self.nodes: list[Node] = []
        self._nursery = nursery
        self._folder = folder
        self._started: list[Forked] = []
        self._guard = threading.Lock()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of every node that lives: whoever joins through them survives the loss of some."""
        return tuple(node.addresses[0] for node in self.nodes)

    def __getitem__(self, peer_id: str) -> Node:
        (node,) = (node for node in self.nodes if node.peer_id == peer_id)
        return node

    def peer_id(self, *, ahead: int) -> str:
        """Of a node to come: the one that is launched next has `ahead` 0."""
        return Identity.load_or_create(self._stem(ahead).with_suffix(".key")).peer_id

    def _stem(self, ahead: int = 0) -> Path:
        return self._folder / f"node-{len(self._started) + ahead}"

    def launch(self, span: Span | int, *flags: str) -> Starting:
        """Start a daemon, with this span or so many blocks, without waiting for it."""
        with self._guard:
            stem = self._stem()
            ready_path, log_path = stem.with_suffix(".json"), stem.with_suffix(".log")
            chosen = "--block-indices" if isinstance(span, Span) else "--num-blocks"
            argv = ["run", str(self.model), chosen, str(span)]
            argv += ["--host-maddrs", LOOPBACK, "--identity-path", str(stem.with_suffix(".key"))]
            argv += ["--ready-file", str(ready_path), "--torch-dtype", "float32", "--threads", "1"]
            if self.nodes:
                argv += ["--initial-peers", *self.addresses]
            log_path.touch()
            if "--attn-cache-tokens" not in flags:
                argv += ["--attn-cache-tokens", "32768"]
            process = self._nursery.run([*argv, *flags], log_path)
            self._started.append(process)
        return Starting(process, log_path, ready_path)

    def wait_for(self, starting: Starting) -> Node:
        deadline = time.monotonic() + READY_S
        while not starting.ready_path.exists():
            late = time.monotonic() > deadline
            if late or starting.process.poll() is not None:
                raise AssertionError(
                    f"a daemon does not serve, exit code {starting.process.poll()}:\n"
                    + starting.log_path.read_text(encoding="utf-8", errors="replace")
                )
            time.sleep(POLL_S)
        ready = json.loads(starting.ready_path.read_text(encoding="utf-8"))
        node = Node(
            process=starting.process,
            peer_id=ready["peer_id"],
            addresses=tuple(ready["addresses"]),
            span=Span(*ready["span"]),
            log_path=starting.log_path,
            ready_path=starting.ready_path,
        )
        self.nodes.append(node)
        return node

    def start(self, spans: Sequence[Span], *flags: str) -> list[Node]:
        """Start a daemon for each span, all at once but for the first of a new swarm."""
        if not self.nodes and spans:
            first = self.wait_for(self.launch(spans[0], *flags))
            return [first, *self.start(spans[1:], *flags)]
        return [self.wait_for(starting) for starting in [self.launch(s, *flags) for s in spans]]

    def mend(self, spans: Sequence[Span]) -> None:
        """Start what is missing of `spans`."""
        self.forget_dead()
        missing = Counter(spans) - Counter(node.span for node in self.nodes)
        self.start(list(missing.elements()))

    def forget_dead(self) -> None:
        self.nodes = [node for node in self.nodes if node.process.poll() is None]

    def kill(self, *victims: Node) -> None:
        """As a power cut would: no goodbye."""
        for victim in victims:
            victim.process.send_signal(signal.SIGKILL)
        for victim in victims:
            victim.process.wait(10)
        self.forget_dead()

    def close(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            for process in self._started:
                process.send_signal(number)
        for process in self._started:
            process.wait(10)
        # Killed daemons leave their runtime directories to the next one that starts.
        remove_stale_directories(Path(tempfile.gettempdir()))


@contextmanager
def open_bed(nursery: Nursery, model: Path, folder: Path) -> Iterator[Bed]:
    """An empty bed; its daemons are killed at the end."""
    bed = Bed(nursery, model, folder)
    try:
        yield bed
    finally:
        bed.close()
