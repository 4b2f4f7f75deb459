"""How a session's hidden states travel to one receiver.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from nesa_node.compression import tensors
from nesa_node.compression.choice import PLAIN_COST, Cost, fastest
from nesa_node.compression.cost import measure_cost
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.compression.quality import EXACT, allowed, allows, candidates, name_of
from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.link_speed import LEAST_BYTES, LinkSpeed
from nesa_node.swarm.messages import MAX_CODECS, Probe, Received, Version
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.outbox import Kept
from nesa_node.swarm.stream import Stream

log = get_logger(__name__)

Encoded = tuple[TensorMeta, bytearray | memoryview]

ASIDE_BYTES = 256 * 1024
"""To compress this much or more would keep an event loop from everything else for too long."""
PROBE_BYTES = 2 * LEAST_BYTES
PLAIN = "none"
UNKNOWN = "?"
"""A codec of somewhere on the way that the session's quality has none of here."""
SINCE = (1, 2)
"""The first version whose peers compress."""


@dataclass(frozen=True, slots=True)
class States:
    """The hidden states that a session sends."""

    hidden_size: int
    dtype: str
    most_tokens: int
    """In one message, which takes no more memory than these."""

    @property
    def most_nbytes(self) -> int:
        return self.most_tokens * self.hidden_size * tensors.DTYPES[self.dtype].itemsize


class Wire:
    """Chooses a codec for each message, by what the link and this machine have shown.

    Never one that the session's quality does not allow, or that the receiver does not decode.
    """

    def __init__(self, quality: str, decodes: Collection[str], speed: LinkSpeed) -> None:
        self._decodes = frozenset((PLAIN, *decodes))
        self._candidates = candidates(quality, self._decodes)
        self._speed = speed
        self._costs: dict[str, Cost] = {}
        self._begun = False

    @property
    def compresses(self) -> bool:
        """Whether it ever does anything to what it encodes."""
        return self._candidates != (PLAIN,)

    def note(self, received: Received) -> None:
        """Learn from the receiver how fast a message came."""
        self._speed.note(received.nbytes, received.seconds)

    async def begin(self, stream: Stream, states: States) -> None:
        """Find out what there is to choose by. Nothing is compressed before.

        Raises `StreamClosedError`.
        """
        if not self.compresses:
            return
        if len(self._candidates) == 1:
            # The first use of bitsandbytes takes seconds.
            token_1D = torch.ones(1, 64, dtype=torch.float32)
            await asyncio.to_thread(tensors.encode, token_1D, codec=self._candidates[0])
            self._begun = True
            return
        hidden_size, dtype = states.hidden_size, tensors.DTYPES[states.dtype]
        for codec in self._candidates:
            self._costs[codec] = await asyncio.to_thread(_cost, codec, hidden_size, dtype)
        self._begun = True
        nbytes = min(PROBE_BYTES, states.most_nbytes)
        if self._speed.is_due and nbytes >= LEAST_BYTES:
            meta, payload = tensors.encode(torch.zeros(nbytes // 4, dtype=torch.float32))
            await stream.send(Probe(tensor=meta), payload)

    def encode(self, hidden: HiddenStates) -> Encoded:
        """Describe and encode hidden states [T, D] for this receiver.

        The result may share their memory.
        """
        return self._counted(_encoded(hidden, self._choose(hidden.nbytes)))

    async def encode_aside(self, hidden: HiddenStates) -> Encoded:
        """The same, in another thread where it would take long."""
        codec = self._choose(hidden.nbytes)
        if hidden.nbytes < ASIDE_BYTES or codec == PLAIN:
            return self._counted(_encoded(hidden, codec))
        return self._counted(await asyncio.to_thread(_encoded, hidden, codec))

    def _counted(self, encoded: Encoded) -> Encoded:
        meta, payload = encoded
        # By name: of parameters there are thousands, and peers choose them.
        self._speed.sent_bytes[name_of(meta.codec)] += len(payload)
        return encoded

    def came(self, meta: TensorMeta, payload: bytearray) -> None:
        """Count what was received, once it has been decoded."""
        self._speed.received_bytes[name_of(meta.codec)] += len(payload)

    def readable(self, kept: Kept) -> Kept:
        """What was encoded for another receiver, for this one: the same bytes, or the same values.

        Raises `ProtocolError` for what never was a tensor.
        """
        if name_of(kept.meta.codec) in self._decodes:
            return kept
        meta, payload = tensors.encode(kept.tensor())
        return Kept(kept.step, kept.rows, kept.want, meta, payload, kept.via)

    def _choose(self, nbytes: int) -> str:
        if not self._begun:
            return PLAIN
        if len(self._candidates) == 1:
            return self._candidates[0]
        rate = self._speed.rate_bytes_per_s
        if rate is None:
            return self._candidates[0]
        return fastest(self._candidates, nbytes, rate, self._costs)


def _encoded(hidden: HiddenStates, codec: str) -> Encoded:
    """In `codec`, unless that makes it no smaller or cannot hold its values."""
    if codec != PLAIN:
        try:
            meta, payload = tensors.encode(hidden.tensor_TD, codec=codec)
            if payload.nbytes < hidden.nbytes:
                return meta, payload
        except ProtocolError as error:
            log.debug("not_compressed", codec=codec, reason=str(error))
    return hidden.meta, hidden.payload


@functools.cache
def _cost(codec: str, hidden_size: int, dtype: torch.dtype) -> Cost:
    if codec == PLAIN:
        return PLAIN_COST
    measured = measure_cost(codec, hidden_size=hidden_size, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(64, hidden_size, generator=generator).to(dtype)
    _, payload = tensors.encode(hidden_TD, codec=codec)
    return Cost(
        measured.seconds(0),
        measured.encode_s_per_byte + measured.decode_s_per_byte,
        len(payload) / hidden_TD.nbytes,
    )


def check_allowed(quality: str, meta: TensorMeta) -> None:
    """Raises `ProtocolError` for hidden states that lost more than their session allows."""
    if not allows(quality, meta.codec):
        raise ProtocolError(
            "bad_tensor", f"codec {meta.codec[:32]!r} in a session of quality {quality!r}"
        )


async def speed_to(swarm: Swarm, peer: PeerId, quality: str) -> LinkSpeed:
    """What is known of the link to a connected peer, for a session of this quality."""
    speed = swarm.speeds.to(peer)
    if quality != EXACT and speed.rate_bytes_per_s is None:
        speed.is_local = await swarm.transport.is_local(peer)
    return speed


async def report_arrival(stream: Stream, quality: str, version: Version) -> None:
    """Tell the sender how fast its last message came, where it can do something about it.

    Not while something else is being sent: whoever reads must not wait for whoever writes, or both
    ends could wait for each other.
    """
    arrival, stream.arrival = stream.arrival, None
    if arrival is not None and quality != EXACT and version >= SINCE and stream.settled:
        await stream.send(arrival)


def known(quality: str, via: Sequence[str]) -> tuple[str, ...]:
    """What is kept of how hidden states travelled: a peer's own texts would take memory."""
    names = _allowed(quality)
    return tuple(names.get(name, UNKNOWN) for name in via)


@functools.lru_cache(maxsize=64)
def _allowed(quality: str) -> dict[str, str]:
    return {name: name for name in allowed(quality)}


def passed_on(via: Sequence[str], codec: str) -> tuple[str, ...]:
    """How hidden states travelled, one hop further; empty as long as that was as they are."""
    return (*via, codec)[-MAX_CODECS:] if via or codec != PLAIN else ()
