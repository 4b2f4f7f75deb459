"""Requests of an owner to the members of a deployment, each on a stream of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from nesa_node.compression.tensors import DTYPES
from nesa_node.core.errors import PeerUnreachableError, ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.model.shard import hash_layout, make_shard_config, read_shard
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.swarm.adapter_transfer import receive_answer, transfer_limit_s
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.protocol.messages import Message
from nesa_node.swarm.protocol.shard_messages import (
    MAX_PART_BYTES,
    SHARD_PROTOCOL,
    ShardDrop,
    ShardDropped,
    ShardHeld,
    ShardPart,
    ShardPut,
    ShardQuery,
    ShardRename,
    ShardWanted,
)
from nesa_node.swarm.protocol.stream import Stream, peer_timeout

_Answer = TypeVar("_Answer", bound=Message)

QUERY_TIMEOUT_S = 5.0
"""For a member to say what it holds; one that is silent for longer counts as lost."""
LOAD_TIMEOUT_S = 120.0
"""For a member to make blocks of weights that it has got, and to measure them."""


class ShardRequests:
    """Asks members at the addresses that it is given."""

    def __init__(self, swarm: Swarm, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        self._swarm = swarm
        self._addresses = addresses

    async def query(self, peer: PeerId, shard: str) -> ShardHeld:
        """What a member says of a shard that it holds.

        Raises `PeerUnreachableError`, `RemoteError` where it holds none, and `ProtocolError`.
        """
        async with peer_timeout(peer, QUERY_TIMEOUT_S, "it was asked for a shard"):
            return await self._ask(peer, ShardHeld, ShardQuery, shard=shard)

    async def rename(self, peer: PeerId, shard: str, new: str) -> ShardHeld:
        """Give a shard a second id. Raises as `query` does."""
        return await self._ask(peer, ShardHeld, ShardRename, shard=shard, new=new)

    async def drop(self, peer: PeerId, shard: str) -> None:
        """Have a member forget an id. Raises as `query` does."""
        await self._ask(peer, ShardDropped, ShardDrop, shard=shard)

    async def put(
        self,
        peer: PeerId,
        shard: str,
        checkpoint: Checkpoint,
        span: Span,
        dtype: str,
        cache_tokens: int,
    ) -> tuple[ShardHeld, int]:
        """Send a member the weights of `span`; also returns their bytes.

        Raises as `query` does, `BusyError`, and what reading the checkpoint raises.
        """
        skeleton, layout = await asyncio.to_thread(_open, checkpoint)
        config = make_shard_config(checkpoint, span)
        nbytes = skeleton.nbytes(skeleton.block_names(span), DTYPES[dtype])
        async with self._stream(peer) as (stream, proof):
            request = ShardPut(
                shard=shard,
                membership=proof,
                config=config,
                blocks=len(span),
                dtype=dtype,  # type: ignore[arg-type]  # checked by `Deployment`
                cache_tokens=cache_tokens,
                layout=layout,
            )
            await stream.send(request)
            wanted = await receive_answer(stream, ShardWanted, timeout_s=LOAD_TIMEOUT_S)
            if wanted.nbytes != nbytes:
                raise ProtocolError(
                    "bad_shard", f"{peer} wants {wanted.nbytes} bytes, and there are {nbytes}"
                )
            try:
                async with asyncio.timeout(transfer_limit_s(nbytes)):
                    tensors = read_shard(skeleton, span, DTYPES[dtype])
                    while (tensor := await asyncio.to_thread(next, tensors, None)) is not None:
                        for part in _cut(tensor):
                            await stream.send(ShardPart(nbytes=len(part)), part)
            except TimeoutError:
                raise PeerUnreachableError(f"{peer} reads too slowly") from None
            return await receive_answer(stream, ShardHeld, timeout_s=LOAD_TIMEOUT_S), nbytes

    async def _ask(
        self, peer: PeerId, answer: type[_Answer], request: type[Message], **fields: Any
    ) -> _Answer:
        async with self._stream(peer) as (stream, proof):
            await stream.send(request(membership=proof, **fields))
            return await receive_answer(stream, answer)

    @asynccontextmanager
    async def _stream(self, peer: PeerId) -> AsyncIterator[tuple[Stream, bytes]]:
        transport = self._swarm.transport
        # The owner gave the addresses: they are dialled as they are.
        await transport.connect(peer, self._addresses[peer])
        pipes = await transport.open_stream(peer, SHARD_PROTOCOL)
        stream = Stream(peer, *pipes)
        try:
            yield stream, adapter_proof(self._swarm.notices.membership, transport.peer_id, peer)
        except StreamClosedError as error:
            raise PeerUnreachableError(f"{peer} closed the stream: {error}") from None
        finally:
            await stream.close()


def _open(checkpoint: Checkpoint) -> tuple[Skeleton, bytes]:
    skeleton = Skeleton(checkpoint)
    layers = getattr(skeleton.decoder, skeleton.family.layers_name)
    return skeleton, hash_layout(layers[0])


def _cut(tensor: Tensor) -> Iterator[memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), MAX_PART_BYTES):
        yield data[start : start + MAX_PART_BYTES]
