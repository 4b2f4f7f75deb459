"""Adapters on a stream between two peers: requests, both files in chunks, and their deadlines.

Clients and nodes share this. `docs/protocol.md` has the messages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from nesa_node.core.errors import (
    BusyError,
    FrameError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
)
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.protocol.adapter_messages import (
    ADAPTER_PROTOCOL,
    MAX_ADAPTER_CHUNK_BYTES,
    MAX_ADAPTER_DIGESTS,
    AdapterChunk,
    AdapterFiles,
    AdapterGet,
    AdapterHeld,
    AdapterPut,
    AdapterQuery,
    AdapterStored,
    AdapterWanted,
)
from nesa_node.swarm.protocol.messages import Busy, ErrorMessage, Message
from nesa_node.swarm.protocol.stream import MessageBudget, Stream

log = get_logger(__name__)

ANSWER_TIMEOUT_S = 20.0
"""Longest wait for a node's answer to a request, and for the next chunk."""
CHECK_TIMEOUT_S = 120.0
"""Longest wait until a node has checked and stored what it received."""
MIN_RATE_BYTES_PER_S = 128 * 1024
"""Rate below which a transfer is ended."""
TRANSFER_GRACE_S = 30.0
MAX_ASKED_NODES = 64
_ASKED_AT_ONCE = 8
_BATCH_BYTES = 1 << 20
"""Bytes that are read or written in one visit of a thread."""

_Answer = TypeVar("_Answer", bound=Message)


def file_bytes(path: Path) -> int:
    return path.stat().st_size


def transfer_limit_s(nbytes: int) -> float:
    """Longest time for a transfer of `nbytes`."""
    return TRANSFER_GRACE_S + nbytes / MIN_RATE_BYTES_PER_S


async def send_files(stream: Stream, config: bytes, weights: Path) -> None:
    """Send both files in chunks.

    Raises `StreamClosedError`, `OSError`, and `ProtocolError("transfer_timeout")` for a receiver
    that reads too slowly.
    """
    size = len(config) + await asyncio.to_thread(file_bytes, weights)
    try:
        async with asyncio.timeout(transfer_limit_s(size)):
            await _send_chunks(stream, config)
            with weights.open("rb") as file:
                while data := await asyncio.to_thread(file.read, _BATCH_BYTES):
                    await _send_chunks(stream, data)
    except TimeoutError:
        raise ProtocolError("transfer_timeout", f"{stream.peer} reads too slowly") from None


async def _send_chunks(stream: Stream, data: bytes) -> None:
    for start in range(0, len(data), MAX_ADAPTER_CHUNK_BYTES):
        await stream.send(AdapterChunk(data=data[start : start + MAX_ADAPTER_CHUNK_BYTES]))


async def receive_files(
    stream: Stream,
    config: Path,
    weights: Path,
    *,
    config_bytes: int,
    weights_bytes: int,
    budget: MessageBudget | None = None,
) -> None:
    """Receive both files, which are new; no more is read or written than was announced.

    `budget` limits how fast the sender is read. Raises `ProtocolError` for a sender that is too
    slow or sends anything else, `StreamClosedError`, and `OSError`.
    """
    try:
        async with asyncio.timeout(transfer_limit_s(config_bytes + weights_bytes)):
            await _receive_file(stream, config, config_bytes, budget)
            await _receive_file(stream, weights, weights_bytes, budget)
    except TimeoutError:
        raise ProtocolError("transfer_timeout", f"{stream.peer} sends too slowly") from None


async def _receive_file(
    stream: Stream, path: Path, nbytes: int, budget: MessageBudget | None
) -> None:
    left, batch = nbytes, bytearray()
    with path.open("xb") as file:
        while left:
            message = await receive_answer(stream, AdapterChunk)
            if len(message.data) > left:
                raise FrameError(f"a chunk of {len(message.data)} bytes; {left} are missing")
            left -= len(message.data)
            batch += message.data
            if len(batch) >= _BATCH_BYTES or not left:
                await asyncio.to_thread(file.write, bytes(batch))
                batch.clear()
            if budget is not None:
                await budget.wait_until_paid(stream, message)


async def receive_answer(
    stream: Stream, *kinds: type[_Answer], timeout_s: float = ANSWER_TIMEOUT_S
) -> _Answer:
    """Receive the next message, which must be of one of `kinds`.

    Raises `BusyError`, `RemoteError` with the peer's reason, and `ProtocolError`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message, _ = await stream.receive()
    except TimeoutError:
        raise ProtocolError("transfer_timeout", f"{stream.peer} sent nothing") from None
    match message:
        case Busy():
            raise BusyError(f"{stream.peer} is busy: {message.message}", message.retry_after_s)
        case ErrorMessage():
            raise RemoteError(message.code, f"{stream.peer}: {message.message}")
    for kind in kinds:
        if isinstance(message, kind):
            return message
    raise ProtocolError("unexpected", f"{message_name(message)} on a stream of adapters")


def message_name(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


class AdapterPeer:
    """Requests to the nodes of one model, each on a stream of its own.

    `PeerUnreachableError` of a method means a node that is gone, or of a version without adapters.
    """

    def __init__(self, swarm: Swarm, model_id: ModelId) -> None:
        self.model_id = model_id
        self._swarm = swarm

    async def query(
        self, peer: PeerId, addresses: Sequence[str], digests: Sequence[str] = ()
    ) -> frozenset[str]:
        """Which of `digests` a node holds; all that it holds, without any.

        Raises `PeerUnreachableError` and `ProtocolError`.
        """
        wanted = tuple(map(bytes.fromhex, digests[:MAX_ADAPTER_DIGESTS]))
        async with self._stream(peer, addresses) as (stream, proof):
            request = AdapterQuery(model=self.model_id, membership=proof, digests=wanted)
            await stream.send(request)
            held = (await receive_answer(stream, AdapterHeld)).digests
        return frozenset(each.hex() for each in held if not wanted or each in wanted)

    async def get(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        digest: str,
        nbytes: int,
        *,
        config: Path,
        weights: Path,
    ) -> None:
        """Fetch an adapter of `nbytes` from a node into two new files, which are to be checked.

        Raises `PeerUnreachableError`, `ProtocolError` and `OSError`.
        """
        async with self._stream(peer, addresses) as (stream, proof):
            wanted = bytes.fromhex(digest)
            await stream.send(AdapterGet(model=self.model_id, membership=proof, digest=wanted))
            sizes = await receive_answer(stream, AdapterFiles)
            if sizes.config_bytes + sizes.weights_bytes != nbytes:
                raise ProtocolError("wrong_adapter", f"{peer} has another size of {digest}")
            await receive_files(
                stream,
                config,
                weights,
                config_bytes=sizes.config_bytes,
                weights_bytes=sizes.weights_bytes,
            )

    async def put(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        *,
        digest: str,
        notice: bytes,
        config: bytes,
        weights: Path,
    ) -> None:
        """Have a node store an adapter that the sealed `notice` lists.

        Raises `PeerUnreachableError`, `BusyError`, `RemoteError` with the node's reason, and
        `OSError`.
        """
        async with self._stream(peer, addresses) as (stream, proof):
            await stream.send(
                AdapterPut(
                    model=self.model_id,
                    membership=proof,
                    digest=bytes.fromhex(digest),
                    notice=notice,
                    config_bytes=len(config),
                    weights_bytes=await asyncio.to_thread(file_bytes, weights),
                )
            )
            answer = await receive_answer(stream, AdapterWanted, AdapterStored)
            if isinstance(answer, AdapterWanted):
                await send_files(stream, config, weights)
                await receive_answer(stream, AdapterStored, timeout_s=CHECK_TIMEOUT_S)

    @asynccontextmanager
    async def _stream(
        self, peer: PeerId, addresses: Sequence[str]
    ) -> AsyncIterator[tuple[Stream, bytes]]:
        """A new stream to a node, and the proof of membership for it."""
        transport = self._swarm.transport
        pipes = await transport.open_stream(peer, ADAPTER_PROTOCOL, addresses)
        stream = Stream(peer, *pipes)
        try:
            yield stream, adapter_proof(self._swarm.notices.membership, transport.peer_id, peer)
        finally:
            await stream.close()


async def find_holders(
    asking: AdapterPeer, nodes: Mapping[PeerId, Sequence[str]], digest: str
) -> dict[PeerId, Sequence[str]]:
    """Those of at most `MAX_ASKED_NODES` nodes that say that they hold an adapter, in random order.

    `nodes` are addresses by peer id. A node that does not answer holds none.
    """
    holders: dict[PeerId, Sequence[str]] = {}
    turns = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(peer: PeerId, addresses: Sequence[str]) -> None:
        try:
            async with turns:
                if digest in await asking.query(peer, addresses, (digest,)):
                    holders[peer] = addresses
        except (PeerUnreachableError, ProtocolError) as error:
            log.debug("adapter_not_asked", peer=peer, reason=str(error))

    async with asyncio.TaskGroup() as tasks:
        for peer in random.sample(sorted(nodes), min(MAX_ASKED_NODES, len(nodes))):
            tasks.create_task(ask(peer, nodes[peer]))
    return holders
