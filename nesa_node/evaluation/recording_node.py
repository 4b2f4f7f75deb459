"""Nodes of a swarm in this process that keep all they receive: what an attacker's node has.

They are nodes like any other one: the same daemon, with a p2pd process of its own.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nesa_node.compression.tensors import decode
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.server.node.daemon import serve_node
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.messages import Open, Step
from nesa_node.swarm.protocol.private_messages import EncryptedInput, MaskedInput
from nesa_node.swarm.protocol.stream import received_by

_LISTEN = "/ip4/127.0.0.1/tcp/0"
_READY_S = 300.0
_STOP_S = 60.0
_MAX_STATES_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    peer: PeerId
    message: AnyMessage
    payload: bytes


@dataclass(slots=True)
class RecordingNode:
    """One node's span, and every message that it received, in order."""

    span: Span
    addresses: tuple[str, ...] = ()
    received: list[ReceivedMessage] = field(default_factory=list)

    def record(self, peer: PeerId, message: AnyMessage, payload: bytes) -> None:
        self.received.append(ReceivedMessage(peer, message, payload))

    def sessions(self) -> list[bytes]:
        """Ids of the sessions that were opened, in order."""
        opened = (each.message.session for each in self.received if isinstance(each.message, Open))
        return list(dict.fromkeys(map(bytes, opened)))

    def states(self, session: bytes) -> Tensor:
        """Hidden states [T, D] of a session's only row, in float32 and in order of positions."""
        parts: dict[int, Tensor] = {}
        for step, payload in self._steps(session):
            values_TD = decode(step.tensor, bytearray(payload), max_bytes=_MAX_STATES_BYTES)
            parts[step.rows[0].position] = values_TD.float()
        return torch.cat([parts[at] for at in sorted(parts)]) if parts else torch.empty(0, 0)

    def step_sizes(self, start: int) -> list[int]:
        """Bytes of the hidden states of all messages from number `start` on."""
        return [
            len(each.payload) for each in self.received[start:] if isinstance(each.message, Step)
        ]

    def private_inputs(self) -> list[tuple[EncryptedInput | MaskedInput, bytes]]:
        """What private sessions sent, in order."""
        return [
            (each.message, each.payload)
            for each in self.received
            if isinstance(each.message, EncryptedInput | MaskedInput)
        ]

    def _steps(self, session: bytes) -> Iterator[tuple[Step, bytes]]:
        for each in self.received:
            if isinstance(each.message, Step) and each.message.session == session:
                yield each.message, each.payload


@contextmanager
def recording_swarm(
    model: Path, spans: Sequence[Span], folder: Path, **options: Any
) -> Iterator[list[RecordingNode]]:
    """Start a node of `model` for each span, in one thread of this process; all join the first.

    `options` are settings of `NodeConfig`. Keys and ready files are written to `folder`. Raises
    what the first node raises that fails, also while it stops, and `SwarmError` if one does not
    serve or stop in time; an error of the caller's goes first. Nodes and their thread have ended
    then in any case.
    """
    with _loop_in_thread() as loop:
        yield from _run_nodes(loop, model, spans, folder, options)


def _run_nodes(
    loop: asyncio.AbstractEventLoop,
    model: Path,
    spans: Sequence[Span],
    folder: Path,
    options: dict[str, Any],
) -> Iterator[list[RecordingNode]]:
    """Yield the nodes once, when all serve; stop them afterwards."""
    stopping: list[asyncio.Event] = []
    running: list[Future[None]] = []
    nodes: list[RecordingNode] = []
    try:
        for number, span in enumerate(spans):
            ready = folder / f"recording-{number}.json"
            config = NodeConfig.model_validate(
                {
                    "model": str(model),
                    "block_indices": span,
                    "initial_peers": nodes[0].addresses if nodes else (),
                    "host_maddrs": (_LISTEN,),
                    "identity_path": folder / f"recording-{number}.key",
                    "ready_file": ready,
                    "torch_dtype": "float32",
                    "device": "cpu",
                    "attn_cache_tokens": 8192,
                    "drain_timeout_s": 2,
                    # Invitations to join are log events then, and not on stdout.
                    "log_format": "json",
                }
                | options
            )
            nodes.append(RecordingNode(span))
            stopping.append(asyncio.Event())
            serving = _serve(config, stopping[-1], nodes[-1])
            running.append(asyncio.run_coroutine_threadsafe(serving, loop))
            _wait_until_ready(ready, running[-1], number)
            nodes[-1].addresses = tuple(json.loads(ready.read_text())["addresses"])
        yield nodes
    finally:
        for event in stopping:
            loop.call_soon_threadsafe(event.set)
        wait(running, _STOP_S)
    # An error of the caller's does not get here.
    for number, each in enumerate(running):
        if not each.done():
            raise SwarmError(f"recording node {number} does not stop within {_STOP_S:.0f} s")
        if each.cancelled():
            raise SwarmError(f"recording node {number} was cancelled")
        each.result()


@contextmanager
def _loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread; at the end its tasks are cancelled, and both end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="recording-nodes")
    thread.start()
    try:
        yield loop
    finally:
        try:
            asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _cancel_tasks() -> None:
    """Cancel all tasks but this one; wait at most `_STOP_S` for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_STOP_S)


async def _serve(config: NodeConfig, stopping: asyncio.Event, node: RecordingNode) -> None:
    # Tasks that the node starts, those of its streams among them, inherit the context.
    received_by.set(node.record)
    await serve_node(config, stopping)


def _wait_until_ready(ready: Path, running: Future[None], number: int) -> None:
    deadline = time.monotonic() + _READY_S
    while not ready.exists():
        if running.done():
            running.result()
        if time.monotonic() > deadline:
            raise SwarmError(f"recording node {number} does not serve after {_READY_S:.0f} s")
        time.sleep(0.05)
