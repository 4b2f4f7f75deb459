"""Answers of a node to clients whose hidden states it does not see: products with its weights.

A node keeps a client's keys of rotations while its stream is open, and nothing else; masks need
none.

P primes, D digits, N degree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nesa_node.core.errors import (
    BusyError,
    NesaError,
    ProtocolError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.engine.kernels.threads import lower_priority
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.privacy.ciphertext import FreshCiphertext, RotationKeys
from nesa_node.privacy.masked_product import masked_bytes
from nesa_node.privacy.packing import packed_bytes, unpack_residues
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.server.private.encoded_blocks import IntegerBlocks, PrivateBlocks
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message
from nesa_node.server.session.peer_access import PeerAccess
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.private_messages import (
    MAX_VECTORS,
    EncryptedInput,
    EncryptedOutput,
    MaskedInput,
    MaskedOutput,
    PrivateOpen,
    PrivateOpened,
    RotationKey,
)
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

T = TypeVar("T")

MAX_STREAMS, MAX_STREAMS_PER_PEER = 16, 4
"""At once; each has up to 40 MB of keys."""
KEY_TIMEOUT_S = 60.0
"""For each key to come."""
IDLE_TIMEOUT_S = 600.0
"""Between products; a client that waited longer opens the stream again."""
RETRY_ENCODING_S = 60.0
MASKED_AT_ONCE = 8
"""Masked vectors, after which another stream has its turn."""
_BUSY_RETRY_S = 5.0


class PrivateServer:
    """Serves private sessions of the blocks that `find_span` gives; `run` encodes them."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        checkpoint: Checkpoint,
        blocks_type: type[PrivateBlocks],
        ring: Ring,
        find_span: Callable[[], Span | None],
        *,
        folder: Path,
        max_bytes: int | None = None,
        allow: frozenset[PeerId] = frozenset(),
        deny: frozenset[PeerId] = frozenset(),
        refusals: RefusalLog | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._blocks_type = blocks_type
        self._ring = ring
        self._find_span = find_span
        self._folder, self._max_bytes = folder, max_bytes
        self._access = PeerAccess(swarm, model_id, allow, deny)
        self._refusals = refusals or RefusalLog()
        self._blocks: PrivateBlocks | None = None
        self._failure: str | None = None
        """Why this daemon serves no private sessions."""
        self._streams: Counter[PeerId] = Counter()
        # Sessions that are served beside these wait for no product.
        self._worker = ThreadPoolExecutor(1, "nesa-private", initializer=lower_priority)

    def schemes(self) -> tuple[str, ...]:
        """What is announced: none where the weights could not be encoded."""
        return (self._blocks_type.scheme,) if self._failure is None else ()

    async def handle(self, peer: PeerId, reader: Any, writer: Any) -> None:
        """Serve one stream; the caller closes it. A peer's mistake is answered, never raised."""
        stream = Stream(peer, reader, writer)
        async with self._refusals.answering(stream):
            message = await receive_first_message(stream)
            if not isinstance(message, PrivateOpen):
                raise ProtocolError("unexpected", "a private stream begins with private_open")
            self._access.require(peer, message.membership, message.model)
            async with self._counted(peer):
                await self._serve(stream, message)

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
        if opened.scheme != self._blocks_type.scheme:
            raise ProtocolError("no_private", f"this node serves {self._blocks_type.scheme} alone")
        blocks = self._require_blocks(None)
        span, rotations = blocks.span, blocks.rotations
        del blocks  # their successors need the memory
        await stream.send(PrivateOpened(blocks=(span.start, span.end), rotations=tuple(rotations)))
        keys = await self._receive_keys(stream, opened, rotations)
        most = MAX_VECTORS * packed_bytes(self._ring, len(self._ring.primes) - 1)
        while True:
            message, payload = await _receive(stream, IDLE_TIMEOUT_S, most)
            match message, self._require_blocks(span):
                case EncryptedInput(), blocks:
                    await self._multiply(stream, blocks, keys, message, payload)
                case MaskedInput(), IntegerBlocks() as blocks:
                    await self._multiply_masked(stream, blocks, message, payload)
                case _:
                    raise ProtocolError("unexpected", "only inputs of products follow the keys")
            del blocks

    async def _receive_keys(
        self, stream: Stream, opened: PrivateOpen, rotations: Sequence[int]
    ) -> dict[int, Residues]:
        keys: dict[int, Residues] = {}
        if not rotations:
            return keys
        if opened.seed is None:
            raise ProtocolError("unexpected", "keys of rotations need a seed")
        most = (len(self._ring.primes) - 1) * packed_bytes(self._ring, len(self._ring.primes))
        for steps in rotations:
            message, payload = await _receive(stream, KEY_TIMEOUT_S, most)
            if not isinstance(message, RotationKey) or message.steps != steps:
                raise ProtocolError("unexpected", f"the key of rotation {steps} was to come")
            keys |= await self._run(_expand, self._ring, opened.seed, steps, payload)
        return keys

    def _require_blocks(self, span: Span | None) -> PrivateBlocks:
        """The encoded blocks, if they are `span`; None: any."""
        if self._blocks is None and self._failure is not None:
            raise ProtocolError("no_private", f"weights were not encoded: {self._failure}")
        if self._blocks is None and span is None:
            raise BusyError("this node encodes its weights", _BUSY_RETRY_S)
        if self._blocks is None or span not in (None, self._blocks.span):
            raise ProtocolError("draining", "this node serves other blocks by now")
        return self._blocks

    async def _multiply(
        self,
        stream: Stream,
        blocks: PrivateBlocks,
        keys: dict[int, Residues],
        message: EncryptedInput,
        payload: bytearray,
    ) -> None:
        blocks.require_product(message.path)
        ring, primes = self._ring, len(self._ring.primes) - 1
        chunks = blocks.chunks(message.path)
        if len(message.seeds) % chunks:
            raise ProtocolError(
                "bad_product", f"{message.path} takes {chunks} ciphertexts for each token"
            )
        c0 = await self._run(unpack_residues, ring, payload, (len(message.seeds),), primes)
        for token in range(len(message.seeds) // chunks):
            taken = range(token * chunks, (token + 1) * chunks)
            fresh = [FreshCiphertext(c0[at], message.seeds[at]) for at in taken]
            packed = await self._run(_multiply_fresh, ring, blocks, message.path, fresh, keys)
            answer = EncryptedOutput(
                request=message.request,
                token=token,
                scale=blocks.scale(message.path),
                nbytes=len(packed),
            )
            await stream.send(answer, packed)

    async def _multiply_masked(
        self, stream: Stream, blocks: IntegerBlocks, message: MaskedInput, payload: bytearray
    ) -> None:
        inputs = blocks.require_product(message.path).inputs
        if len(payload) != (expected := masked_bytes(message.tokens * inputs)):
            raise ProtocolError(
                "bad_product", f"{message.path}: {expected} bytes expected, {len(payload)} came"
            )
        packed, size = b"", masked_bytes(MASKED_AT_ONCE * inputs)
        for start in range(0, len(payload), size):
            part = payload[start : start + size]
            packed += await self._run(blocks.multiply_masked, message.path, part)
        await stream.send(MaskedOutput(request=message.request, nbytes=len(packed)), packed)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """One call after another: products take the whole of the thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._worker, partial(function, *arguments)
        )

    async def run(self) -> None:
        """Encode the blocks that are served, again when they change."""
        try:
            await self._encode_served()
        finally:
            self._worker.shutdown(wait=False, cancel_futures=True)

    async def _encode_served(self) -> None:
        while True:
            span = self._find_span()
            if self._blocks is not None and self._blocks.span != span:
                self._blocks = None
            if span is not None and self._blocks is None:
                try:
                    await self._encode(span)
                except (NesaError, OSError, MemoryError, ValueError) as error:
                    log.error("weights_not_encoded", blocks=str(span), reason=str(error))
                    self._failure = str(error)
                    await asyncio.sleep(RETRY_ENCODING_S)
                else:
                    self._failure = None
            await asyncio.sleep(_BUSY_RETRY_S)

    async def _encode(self, span: Span) -> None:
        log.info("encoding_weights", blocks=str(span))
        blocks = await asyncio.to_thread(self._blocks_type, self._ring, self._checkpoint, span)
        store = await asyncio.to_thread(blocks.open_store, self._folder, self._max_bytes)
        try:
            await asyncio.to_thread(blocks.encode, store)
        except asyncio.CancelledError:
            blocks.stop()
            raise
        self._blocks = blocks
        mapped = {"mapped_mib": store.mapped_bytes >> 20} if store.mapped_bytes else {}
        log.info("weights_encoded", blocks=str(span), mib=blocks.nbytes >> 20, **mapped)


async def _receive(
    stream: Stream, timeout_s: float, max_bytes: int
) -> tuple[AnyMessage, bytearray]:
    """The next message. Raises `ProtocolError("idle_timeout")` where none comes."""
    try:
        async with asyncio.timeout(timeout_s):
            return await stream.receive(max_tensor_bytes=max_bytes)
    except TimeoutError:
        raise ProtocolError("idle_timeout", f"nothing came for {timeout_s:.0f} s") from None


def _expand(ring: Ring, seed: bytes, steps: int, payload: bytearray) -> dict[int, Residues]:
    """A rotation's key [D, 2, P, N]."""
    primes = len(ring.primes)
    halves = unpack_residues(ring, payload, (primes - 1,), primes)
    return RotationKeys(seed, {steps: halves}).expand(ring)


def _multiply_fresh(
    ring: Ring,
    blocks: PrivateBlocks,
    path: str,
    fresh: Sequence[FreshCiphertext],
    keys: Mapping[int, Residues],
) -> bytes:
    return blocks.multiply(path, [each.expand(ring) for each in fresh], keys)
