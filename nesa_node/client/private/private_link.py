"""One node's stream of a private session: keys first, then products."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from nesa_node.core.errors import (
    BusyError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.layout import ProductLayout
from nesa_node.privacy.packing import pack_residues, packed_bytes, unpack_residues
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.secret_key import SecretKey
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.messages import Busy, ErrorMessage
from nesa_node.swarm.protocol.private_messages import (
    MAX_VECTORS,
    PRIVATE_PROTOCOL,
    EncryptedInput,
    EncryptedOutput,
    PrivateOpen,
    PrivateOpened,
    RotationKey,
)
from nesa_node.swarm.protocol.stream import Stream, peer_timeout

OPEN_TIMEOUT_S = 10.0
"""For a node to answer; its keys then take as long as they take, each `FRAME_TIMEOUT_S`."""
PRODUCT_TIMEOUT_S = 60.0
"""Of one token's product; a node that takes longer is left."""

Answer = tuple[Residues, float]
"""Coefficients [blocks, 2, 2, N] of a product, and their scale."""


class SessionKeys:
    """A secret key, and packed keys of rotations, made as nodes ask for them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.secret = SecretKey(ring)
        self.seed = self.secret.rotation_seed
        self._packed: dict[int, bytes] = {}

    def packed(self, steps: int) -> bytes:
        """Half of a key, to be sent. Blocks the thread for a millisecond."""
        if steps not in self._packed:
            self._packed[steps] = pack_residues(self.ring, self.secret.rotation_key(steps))
        return self._packed[steps]


class PrivateLink:
    """Products of one node. One request at a time."""

    def __init__(self, stream: Stream, span: Span, ring: Ring) -> None:
        self.peer = stream.peer
        self.span = span
        self._stream = stream
        self._ring = ring
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()

    async def multiply(
        self, path: str, layout: ProductLayout, tokens: Sequence[Sequence[FreshCiphertext]]
    ) -> list[Answer]:
        """Products of each token's chunks with the weights at `path`.

        Raises `PeerUnreachableError`, `RemoteError` with the node's reason, and `ProtocolError` for
        a node that breaks the protocol.
        """
        answers: list[Answer] = []
        at_once = MAX_VECTORS // len(layout.chunks)
        async with self._turn:
            for start in range(0, len(tokens), at_once):
                answers += await self._multiply(path, layout, tokens[start : start + at_once])
        return answers

    async def _multiply(
        self, path: str, layout: ProductLayout, tokens: Sequence[Sequence[FreshCiphertext]]
    ) -> list[Answer]:
        fresh = [chunk for chunks in tokens for chunk in chunks]
        c0 = np.stack([each.c0 for each in fresh])
        payload = await asyncio.to_thread(pack_residues, self._ring, c0)
        message = EncryptedInput(
            request=next(self._numbers),
            path=path,
            seeds=tuple(each.seed for each in fresh),
            nbytes=len(payload),
        )
        shape, size = (len(layout.blocks), 2), packed_bytes(self._ring, 2)
        answers = []
        try:
            await self._stream.send(message, payload)
            for token in range(len(tokens)):
                async with peer_timeout(self.peer, PRODUCT_TIMEOUT_S, "a product was computed"):
                    answer, data = await self._stream.receive(
                        max_tensor_bytes=shape[0] * shape[1] * size
                    )
                output = self._check(answer, message.request, token)
                parts = await asyncio.to_thread(unpack_residues, self._ring, data, shape, 2)
                answers.append((parts, output.scale))
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from None
        return answers

    def _check(self, answer: AnyMessage, request: int, token: int) -> EncryptedOutput:
        if isinstance(answer, ErrorMessage):
            raise RemoteError(answer.code, f"{self.peer}: {answer.message}")
        if not isinstance(answer, EncryptedOutput) or (answer.request, answer.token) != (
            request,
            token,
        ):
            raise ProtocolError("unexpected", f"{self.peer} answers something else than was asked")
        return answer


@asynccontextmanager
async def open_private_link(
    swarm: Swarm,
    model_id: ModelId,
    peer: PeerId,
    addresses: Sequence[str],
    keys: SessionKeys,
    block: int,
) -> AsyncIterator[PrivateLink]:
    """Open a stream to a node that has `block`, and give it the keys that its products need.

    Raises `PeerUnreachableError` (also for a node that serves no private sessions), `BusyError`,
    `RemoteError` for a node that refuses, and `ProtocolError` for one that breaks the protocol or
    has other blocks by now.
    """
    async with peer_timeout(peer, OPEN_TIMEOUT_S, "a private stream was opened"):
        pipes = await swarm.transport.open_stream(peer, PRIVATE_PROTOCOL, addresses)
    stream = Stream(peer, *pipes)
    try:
        try:
            async with peer_timeout(peer, OPEN_TIMEOUT_S, "a private stream was opened"):
                proof = adapter_proof(swarm.notices.membership, swarm.transport.peer_id, peer)
                await stream.send(
                    PrivateOpen(model=model_id, membership=proof, scheme="ckks", seed=keys.seed)
                )
                message, _ = await stream.receive()
            opened = _check_opened(message, peer, block)
            await _send_keys(stream, opened, keys)
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from None
        yield PrivateLink(stream, Span(*opened.blocks), keys.ring)
    finally:
        await stream.close()


def _check_opened(message: AnyMessage, peer: PeerId, block: int) -> PrivateOpened:
    match message:
        case PrivateOpened(blocks=(start, end)) if start <= block < end:
            return message
        case PrivateOpened():
            raise ProtocolError("wrong_blocks", f"{peer} multiplies with blocks {message.blocks}")
        case Busy():
            raise BusyError(f"{peer} is busy: {message.message}", message.retry_after_s)
        case ErrorMessage():
            raise RemoteError(message.code, f"{peer}: {message.message}")
        case _:
            raise ProtocolError("unexpected", f"{peer} does not answer private_open")


async def _send_keys(stream: Stream, opened: PrivateOpened, keys: SessionKeys) -> None:
    slots = keys.ring.parameters.slots
    for steps in opened.rotations:
        if steps >= slots:
            raise ProtocolError("bad_rotation", f"{stream.peer} asks for a rotation by {steps}")
        packed = await asyncio.to_thread(keys.packed, steps)
        await stream.send(RotationKey(steps=steps, nbytes=len(packed)), packed)
