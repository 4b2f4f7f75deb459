"""One node's stream of a private session: keys first, then products.

T tokens, I inputs, O outputs, B blocks, R rows of a block, N degree.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TypeVar

import numpy as np

from nesa_node.core.errors import (
    BusyError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.layout import ProductLayout
from nesa_node.privacy.masked_product import (
    Masked,
    MaskLayout,
    mask_product_bytes,
    masked_bytes,
    pack_masked,
    unpack_mask_product,
    unpack_masked,
)
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
    MaskedInput,
    MaskedOutput,
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

MaskProduct = tuple[Residues, Residues]
"""Coefficients [B, 2, R] and [B, 2, N] of a product with a mask."""

T = TypeVar("T")


class SessionKeys:
    """A secret key, and packed keys of rotations, made as nodes ask for them."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._packed: dict[int, bytes] = {}

    @cached_property
    def secret(self) -> SecretKey:
        return SecretKey(self.ring)

    @property
    def seed(self) -> bytes:
        return self.secret.rotation_seed

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
        self.nbytes = 0
        """Sent and received, of inputs and products."""
        self.has_answered = False
        """Whether a product came."""
        self._stream = stream
        self._ring = ring
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()

    async def multiply(
        self, path: str, layout: ProductLayout, tokens: Sequence[Sequence[FreshCiphertext]]
    ) -> list[Answer]:
        """Products of each token's encrypted chunks with the weights at `path`.

        Raises `PeerUnreachableError`, `RemoteError` with the node's reason, and `ProtocolError` for
        a node that breaks the protocol.
        """
        shape = len(layout.blocks), 2
        size = shape[0] * shape[1] * packed_bytes(self._ring, 2)

        def read(output: EncryptedOutput, data: bytearray) -> Answer:
            return unpack_residues(self._ring, data, shape, 2), output.scale

        return await self._multiply(path, tokens, size, read)

    async def multiply_masks(
        self, path: str, layout: MaskLayout, tokens: Sequence[Sequence[FreshCiphertext]]
    ) -> list[MaskProduct]:
        """Products of each token's encrypted mask. Raises as `multiply` does."""

        def read(_: EncryptedOutput, data: bytearray) -> MaskProduct:
            return unpack_mask_product(self._ring, layout, data)

        return await self._multiply(path, tokens, mask_product_bytes(self._ring, layout), read)

    async def multiply_masked(self, path: str, masked_TI: Masked, outputs: int) -> Masked:
        """Products [T, O] of masked vectors. Raises as `multiply` does."""
        payload = pack_masked(masked_TI)
        message = MaskedInput(
            request=next(self._numbers), path=path, tokens=len(masked_TI), nbytes=len(payload)
        )
        shape = len(masked_TI), outputs
        async with self._turn:
            await self._send(message, payload)
            answer, data = await self._receive(masked_bytes(math.prod(shape)))
        match answer:
            case MaskedOutput(request=request) if request == message.request:
                if len(data) == masked_bytes(math.prod(shape)):
                    return unpack_masked(data, shape)
        raise self._unexpected(answer)

    async def _multiply(
        self,
        path: str,
        tokens: Sequence[Sequence[FreshCiphertext]],
        max_bytes: int,
        read: Callable[[EncryptedOutput, bytearray], T],
    ) -> list[T]:
        """What `read` makes of each token's answer, of `max_bytes` at most."""
        answers: list[T] = []
        at_once = MAX_VECTORS // len(tokens[0])
        async with self._turn:
            for start in range(0, len(tokens), at_once):
                message, payload = await asyncio.to_thread(
                    self._pack, path, tokens[start : start + at_once]
                )
                await self._send(message, payload)
                for token in range(len(tokens[start : start + at_once])):
                    answer, data = await self._receive(max_bytes)
                    match answer:
                        case EncryptedOutput(request=request, token=its) if (request, its) == (
                            message.request,
                            token,
                        ):
                            answers.append(await asyncio.to_thread(read, answer, data))
                        case _:
                            raise self._unexpected(answer)
        return answers

    def _pack(
        self, path: str, tokens: Sequence[Sequence[FreshCiphertext]]
    ) -> tuple[EncryptedInput, bytes]:
        fresh = [chunk for chunks in tokens for chunk in chunks]
        payload = pack_residues(self._ring, np.stack([each.c0 for each in fresh]))
        message = EncryptedInput(
            request=next(self._numbers),
            path=path,
            seeds=tuple(each.seed for each in fresh),
            nbytes=len(payload),
        )
        return message, payload

    async def _send(self, message: EncryptedInput | MaskedInput, payload: bytes) -> None:
        try:
            await self._stream.send(message, payload)
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from None
        self.nbytes += len(payload)

    async def _receive(self, max_bytes: int) -> tuple[AnyMessage, bytearray]:
        try:
            async with peer_timeout(self.peer, PRODUCT_TIMEOUT_S, "a product was computed"):
                answer, data = await self._stream.receive(max_tensor_bytes=max_bytes)
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from None
        self.nbytes += len(data)
        self.has_answered |= not isinstance(answer, ErrorMessage)
        return answer, data

    def _unexpected(self, answer: AnyMessage) -> NesaError:
        if isinstance(answer, ErrorMessage):
            return RemoteError(answer.code, f"{self.peer}: {answer.message}")
        return ProtocolError("unexpected", f"{self.peer} answers something else than was asked")


@asynccontextmanager
async def open_private_link(
    swarm: Swarm,
    model_id: ModelId,
    peer: PeerId,
    addresses: Sequence[str],
    scheme: PrivateScheme,
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
                seed = keys.seed if scheme == "ckks" else None
                opening = PrivateOpen(model=model_id, membership=proof, scheme=scheme, seed=seed)
                await stream.send(opening)
                message, _ = await stream.receive()
            opened = _check_opened(message, peer, scheme, block)
            await _send_keys(stream, opened, keys)
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from None
        yield PrivateLink(stream, Span(*opened.blocks), keys.ring)
    finally:
        await stream.close()


def _check_opened(
    message: AnyMessage, peer: PeerId, scheme: PrivateScheme, block: int
) -> PrivateOpened:
    match message:
        case PrivateOpened(rotations=steps) if len({*steps}) < len(steps) or (
            steps and scheme != "ckks"
        ):
            raise ProtocolError("bad_rotation", f"{peer} asks for keys that no product needs")
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
