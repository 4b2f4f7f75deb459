"""A node of this process that is told to move."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nesa_node.cli.services.local_swarm import LOOPBACK, stop_processes
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.server.node.move_limiter import MoveLimiter, MoveOutcome
from tests.faults.bed import READY_S, Bed
from tests.faults.nursery import POLL_S
from tests.swarms import NodeThread


@dataclass(frozen=True, slots=True)
class Mover:
    peer_id: str
    addresses: tuple[str, ...]
    ready_path: Path
    moves: MoveLimiter
    thread: NodeThread

    def ask(self, span: Span) -> MoveOutcome:
        """Wish, and wait for what becomes of it."""

        async def asked() -> MoveOutcome:
            return await self.moves.request_move(span, "test").wait()

        return self.thread.run(asked())

    def stop(self) -> None:
        """As SIGTERM would."""
        self.thread.stop()

    @property
    def span(self) -> Span:
        """Raises `FileNotFoundError` while it serves none."""
        return Span(*json.loads(self.ready_path.read_text())["span"])


def mover_config(bed: Bed, span: Span, folder: Path, **options: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "model": str(bed.model),
            "block_indices": span,
            "initial_peers": bed.addresses,
            "host_maddrs": (LOOPBACK,),
            "identity_path": folder / "mover.key",
            "ready_file": folder / "mover.json",
            "torch_dtype": "float32",
            "device": "cpu",
            "attn_cache_tokens": 32_768,
        }
        | options
    )


@contextmanager
def open_mover(bed: Bed, span: Span, folder: Path, **options: Any) -> Iterator[Mover]:
    """A node that begins with `span` and may move as often as it is asked to."""
    config = mover_config(bed, span, folder, **options)
    moves = MoveLimiter(per_hour=100, pause_s=0)
    ready = folder / "mover.json"
    with NodeThread() as thread:
        thread.start(config, moves)
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            thread.check()
            assert time.monotonic() < deadline, "the mover does not serve"
            time.sleep(POLL_S)
        facts = json.loads(ready.read_text())
        yield Mover(facts["peer_id"], tuple(facts["addresses"]), ready, moves, thread)
        thread.check()


class MovingProcess:
    """`moving_node.py` as a process of its own."""

    def __init__(self, process: subprocess.Popen[str], config: NodeConfig, log_path: Path) -> None:
        self.process = process
        self.log_path = log_path
        assert config.ready_file is not None
        self.ready_path = config.ready_file

    def tell(self, span: Span) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{span}\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, int]:
        """What became of the wish, and the process's own memory in bytes."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words, self.log_path.read_text()
        return words[0], int(words[1])


@contextmanager
def open_moving_process(config: NodeConfig, log_path: Path) -> Iterator[MovingProcess]:
    """Yields once it serves; ends it."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.moving_node", config.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    moving = MovingProcess(process, config, log_path)
    try:
        deadline = time.monotonic() + READY_S
        while not moving.ready_path.exists():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, "it does not serve"
            time.sleep(POLL_S)
        yield moving
    finally:
        stop_processes([process])  # type: ignore[list-item]
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
