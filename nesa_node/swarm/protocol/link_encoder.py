"""Encoding of a session's hidden states for one receiver.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from nesa_node.compression import tensors
from nesa_node.compression.codec_cost import (
    PLAIN_COST,
    CodecLinkCost,
    fastest_codec,
    measure_codec_cost,
)
from nesa_node.compression.codecs import (
    EXACT,
    UNCOMPRESSED,
    allowed_codecs,
    allows_codec,
    candidate_codecs,
    codec_name,
)
from nesa_node.compression.tensors import HiddenStates, TensorMeta
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.link_measurements import MIN_SAMPLE_BYTES, LinkSpeed
from nesa_node.swarm.protocol.messages import MAX_CODECS, Probe, Received, Version
from nesa_node.swarm.protocol.replay_buffer import SentStep
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

Encoded = tuple[TensorMeta, bytearray | memoryview]

OFF_LOOP_BYTES = 256 * 1024
"""Size from which on hidden states are compressed in a thread, not to block the event loop."""
PROBE_BYTES = 2 * MIN_SAMPLE_BYTES
UNKNOWN_CODEC = "?"
"""Stands in `via` for a codec that the session's quality does not allow."""
MIN_COMPRESSION_VERSION = (1, 2)
"""First protocol version with compression."""


@dataclass(frozen=True, slots=True)
class HiddenStatesSpec:
    """Size and dtype of the hidden states that a session sends."""

    hidden_size: int
    dtype: str
    max_tokens: int
    """Tokens in one message, at most."""

    @property
    def max_nbytes(self) -> int:
        return self.max_tokens * self.hidden_size * tensors.DTYPES[self.dtype].itemsize


class LinkEncoder:
    """Encoder that chooses each message's codec by the link's throughput and the codecs' cost here.

    Only codecs that the session's quality allows and the receiver decodes are used.
    """

    def __init__(self, quality: str, decodable: Collection[str], speed: LinkSpeed) -> None:
        self._decodes = frozenset((UNCOMPRESSED, *decodable))
        self._candidates = candidate_codecs(quality, self._decodes)
        self._speed = speed
        self._costs: dict[str, CodecLinkCost] = {}
        self._is_prepared = False

    @property
    def compresses(self) -> bool:
        """Whether any codec but "none" may be chosen."""
        return self._candidates != (UNCOMPRESSED,)

    def record_arrival(self, received: Received) -> None:
        """Record a receiver's report of a message's arrival time."""
        self._speed.record_report(received.nbytes, received.seconds)

    async def prepare(self, stream: Stream, states: HiddenStatesSpec) -> None:
        """Measure the codecs' costs and probe the link; nothing is compressed before.

        Raises `StreamClosedError`.
        """
        if not self.compresses:
            return
        if len(self._candidates) == 1:
            # The first use of bitsandbytes takes seconds.
            token_1D = torch.ones(1, 64, dtype=torch.float32)
            await asyncio.to_thread(tensors.encode, token_1D, codec=self._candidates[0])
            self._is_prepared = True
            return
        hidden_size, dtype = states.hidden_size, tensors.DTYPES[states.dtype]
        for codec in self._candidates:
            self._costs[codec] = await asyncio.to_thread(link_cost, codec, hidden_size, dtype)
        self._is_prepared = True
        nbytes = min(PROBE_BYTES, states.max_nbytes)
        if self._speed.needs_probe and nbytes >= MIN_SAMPLE_BYTES:
            meta, payload = tensors.encode(torch.zeros(nbytes // 4, dtype=torch.float32))
            await stream.send(Probe(tensor=meta), payload)

    def encode(self, hidden: HiddenStates) -> Encoded:
        """Encode hidden states [T, D] for this receiver; the result may share their memory."""
        return self._count_sent(_encode(hidden, self._choose_codec(hidden.nbytes)))

    async def encode_off_loop(self, hidden: HiddenStates) -> Encoded:
        """Encode like `encode`, but compress `OFF_LOOP_BYTES` or more in another thread."""
        codec = self._choose_codec(hidden.nbytes)
        if hidden.nbytes < OFF_LOOP_BYTES or codec == UNCOMPRESSED:
            return self._count_sent(_encode(hidden, codec))
        return self._count_sent(await asyncio.to_thread(_encode, hidden, codec))

    def _count_sent(self, encoded: Encoded) -> Encoded:
        meta, payload = encoded
        # By name, without parameters: peers choose among thousands of these.
        self._speed.sent_bytes[codec_name(meta.codec)] += len(payload)
        return encoded

    def count_received(self, meta: TensorMeta, payload: bytearray) -> None:
        """Count received bytes, after they have been decoded."""
        self._speed.received_bytes[codec_name(meta.codec)] += len(payload)

    def reencode(self, sent: SentStep) -> SentStep:
        """Convert a step encoded for another receiver, keeping its values.

        The bytes are kept as they are if this receiver decodes them. Raises `ProtocolError` if they
        are no valid tensor.
        """
        if codec_name(sent.meta.codec) in self._decodes:
            return sent
        meta, payload = tensors.encode(sent.decode())
        return SentStep(sent.step, sent.rows, sent.want, meta, payload, sent.via)

    def _choose_codec(self, nbytes: int) -> str:
        if not self._is_prepared:
            return UNCOMPRESSED
        if len(self._candidates) == 1:
            return self._candidates[0]
        rate = self._speed.rate_bytes_per_s
        if rate is None:
            return self._candidates[0]
        return fastest_codec(self._candidates, nbytes, rate, self._costs)


def _encode(hidden: HiddenStates, codec: str) -> Encoded:
    """Encode in `codec`; uncompressed if that is not smaller or cannot represent the values."""
    if codec != UNCOMPRESSED:
        try:
            meta, payload = tensors.encode(hidden.tensor_TD, codec=codec)
            if payload.nbytes < hidden.nbytes:
                return meta, payload
        except ProtocolError as error:
            log.debug("compression_skipped", codec=codec, reason=str(error))
    return hidden.meta, hidden.payload


@functools.cache
def link_cost(codec: str, hidden_size: int, dtype: torch.dtype) -> CodecLinkCost:
    """Cost of a codec on this machine, measured once. Blocks for milliseconds."""
    if codec == UNCOMPRESSED:
        return PLAIN_COST
    measured = measure_codec_cost(codec, hidden_size=hidden_size, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(64, hidden_size, generator=generator).to(dtype)
    _, payload = tensors.encode(hidden_TD, codec=codec)
    return CodecLinkCost(
        measured.seconds(0),
        measured.encode_s_per_byte + measured.decode_s_per_byte,
        len(payload) / hidden_TD.nbytes,
    )


def check_codec_allowed(quality: str, meta: TensorMeta) -> None:
    """Raise `ProtocolError` if the session's quality does not allow the tensor's codec."""
    if not allows_codec(quality, meta.codec):
        raise ProtocolError(
            "bad_tensor", f"codec {meta.codec[:32]!r} in a session of quality {quality!r}"
        )


async def get_link_speed(swarm: Swarm, peer: PeerId, quality: str) -> LinkSpeed:
    """Get the `LinkSpeed` of a connected peer; marks a peer on this machine as local."""
    speed = swarm.link_speeds.link_to(peer)
    if quality != EXACT and speed.rate_bytes_per_s is None:
        speed.is_local = await swarm.transport.is_local(peer)
    return speed


async def report_arrival(stream: Stream, quality: str, version: Version) -> None:
    """Report the last message's arrival time to its sender, if that may compress.

    Skipped while the stream is busy sending: a reader that waited for a writer could deadlock with
    the other end.
    """
    arrival, stream.arrival = stream.arrival, None
    if (
        arrival is not None
        and quality != EXACT
        and version >= MIN_COMPRESSION_VERSION
        and stream.can_send_now
    ):
        await stream.send(arrival)


def normalize_via(quality: str, via: Sequence[str]) -> tuple[str, ...]:
    """Replace a peer's codec names by shared strings, and unknown names by `UNKNOWN_CODEC`."""
    names = _allowed_codecs(quality)
    return tuple(names.get(name, UNKNOWN_CODEC) for name in via)


@functools.lru_cache(maxsize=64)
def _allowed_codecs(quality: str) -> dict[str, str]:
    return {name: name for name in allowed_codecs(quality)}


def extend_via(via: Sequence[str], codec: str) -> tuple[str, ...]:
    """Append the codec of one more link to `via`; empty as long as no link compressed."""
    return (*via, codec)[-MAX_CODECS:] if via or codec != UNCOMPRESSED else ()
