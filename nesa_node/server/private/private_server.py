"""Answers of a node to clients whose hidden states it does not see: products on encrypted vectors.

A node keeps a client's keys of rotations while its stream is open, and nothing else.

P primes, D digits, N degree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from nesa_node.core.errors import (
    BusyError,
    NesaError,
    ProtocolError,
    StreamClosedError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.privacy.ciphertext import FreshCiphertext, RotationKeys
from nesa_node.privacy.packing import pack_residues, packed_bytes, unpack_residues
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.server.private.encoded_blocks import EncodedBlocks
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message, send_refusal
from nesa_node.server.session.peer_access import PeerAccess
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.private_messages import (
    MAX_PAYLOAD_BYTES,
    EncryptedInput,
    EncryptedOutput,
    PrivateOpen,
    PrivateOpened,
    RotationKey,
)
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

MAX_STREAMS, MAX_STREAMS_PER_PEER = 16, 4
"""At once; each has up to 40 MB of keys."""
_BUSY_RETRY_S = 5.0


class PrivateServer:
    """Serves private sessions of the blocks that `find_span` gives; `run` encodes them."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        checkpoint: Checkpoint,
        ring: Ring,
        find_span: Callable[[], Span | None],
        *,
        max_bytes: int | None = None,
        allow: frozenset[PeerId] = frozenset(),
        deny: frozenset[PeerId] = frozenset(),
        refusals: RefusalLog | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._ring = ring
        self._find_span = find_span
        self._max_bytes = max_bytes
        self._access = PeerAccess(swarm, model_id, allow, deny)
        self._refusals = refusals or RefusalLog()
        self._blocks: EncodedBlocks | None = None
        self._failure: str | None = None
        """Why this daemon serves no private sessions."""
        self._streams: Counter[PeerId] = Counter()
        self._turn = asyncio.Lock()

    async def handle(self, peer: PeerId, reader: Any, writer: Any) -> None:
        """Serve one stream; the caller closes it. A peer's mistake is answered, never raised."""
        stream = Stream(peer, reader, writer)
        try:
            message = await receive_first_message(stream)
            if not isinstance(message, PrivateOpen):
                raise ProtocolError("unexpected", "a private stream begins with private_open")
            self._access.require(peer, message.membership, message.model)
            async with self._counted(peer):
                await self._serve(stream, message)
        except StreamClosedError:
            log.debug("stream_ended", peer=peer)
        except ProtocolError as error:
            self._refusals.record(peer=peer, code=error.code, reason=str(error))
            await send_refusal(stream, error)

    @asynccontextmanager
    async def _counted(self, peer: PeerId) -> AsyncIterator[None]:
        total = self._streams.total()
        if total >= MAX_STREAMS or self._streams[peer] >= MAX_STREAMS_PER_PEER:
            raise BusyError("too many private sessions are open", _BUSY_RETRY_S)
        self._streams[peer] += 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, stream: Stream, opened: PrivateOpen) -> None:
        blocks = self._blocks
        if self._failure is not None:
            raise ProtocolError("no_private", f"weights were not encoded: {self._failure}")
        if blocks is None:
            raise BusyError("this node encodes its weights", _BUSY_RETRY_S)
        span = blocks.span
        await stream.send(
            PrivateOpened(blocks=(span.start, span.end), rotations=tuple(blocks.rotations))
        )
        keys = await self._receive_keys(stream, opened.seed, blocks.rotations)
        while True:
            message, payload = await stream.receive(max_tensor_bytes=MAX_PAYLOAD_BYTES)
            if not isinstance(message, EncryptedInput):
                raise ProtocolError("unexpected", "only encrypted inputs follow the keys")
            await self._multiply(stream, blocks, keys, message, payload)

    async def _receive_keys(
        self, stream: Stream, seed: bytes, rotations: list[int]
    ) -> dict[int, Residues]:
        """All keys, expanded: [D, 2, P, N] each."""
        ring, primes = self._ring, len(self._ring.primes)
        most = (primes - 1) * packed_bytes(ring, primes)
        keys: dict[int, Residues] = {}
        for steps in rotations:
            message, payload = await stream.receive(max_tensor_bytes=most)
            if not isinstance(message, RotationKey) or message.steps != steps:
                raise ProtocolError("unexpected", f"the key of rotation {steps} was to come")
            b_DPN = await asyncio.to_thread(unpack_residues, ring, payload, (primes - 1,), primes)
            expand = RotationKeys(seed, {steps: b_DPN}).expand
            keys |= await asyncio.to_thread(expand, ring)
        return keys

    async def _multiply(
        self,
        stream: Stream,
        blocks: EncodedBlocks,
        keys: dict[int, Residues],
        message: EncryptedInput,
        payload: bytearray,
    ) -> None:
        ring, primes = self._ring, len(self._ring.primes) - 1
        chunks = len(blocks.find_layout(message.path).chunks)
        if len(message.seeds) % chunks:
            raise ProtocolError(
                "bad_product", f"{message.path} takes {chunks} ciphertexts for each token"
            )
        c0 = await asyncio.to_thread(unpack_residues, ring, payload, (len(message.seeds),), primes)
        for token in range(len(message.seeds) // chunks):
            taken = range(token * chunks, (token + 1) * chunks)
            fresh = [FreshCiphertext(c0[at], message.seeds[at]) for at in taken]
            async with self._turn:
                compute = partial(_multiply_packed, ring, blocks, message.path, fresh, keys)
                packed = await asyncio.to_thread(compute)
            answer = EncryptedOutput(
                request=message.request,
                token=token,
                scale=blocks.scale(message.path),
                nbytes=len(packed),
            )
            await stream.send(answer, packed)

    async def run(self) -> None:
        """Encode the blocks that are served, again when they change."""
        while True:
            span = self._find_span()
            if span is not None and (self._blocks is None or self._blocks.span != span):
                try:
                    await self._encode(span)
                except (NesaError, OSError) as error:
                    log.error("weights_not_encoded", blocks=str(span), reason=str(error))
                    self._failure = str(error)
                    return
            await asyncio.sleep(_BUSY_RETRY_S)

    async def _encode(self, span: Span) -> None:
        self._blocks = None
        log.info("encoding_weights", blocks=str(span))
        blocks = await asyncio.to_thread(
            EncodedBlocks, self._ring, self._checkpoint, span, self._max_bytes
        )
        await asyncio.to_thread(blocks.encode)
        self._blocks = blocks
        log.info("weights_encoded", blocks=str(span), mib=blocks.nbytes >> 20)


def _multiply_packed(
    ring: Ring,
    blocks: EncodedBlocks,
    path: str,
    fresh: list[FreshCiphertext],
    keys: dict[int, Residues],
) -> bytes:
    products = blocks.multiply(path, [each.expand(ring) for each in fresh], keys)
    return pack_residues(ring, np.stack(products))
