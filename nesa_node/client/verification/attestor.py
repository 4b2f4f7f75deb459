"""A client's demand that nodes attest their hardware, before it uses them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from nesa_node.core.errors import (
    AttestationError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    RemoteError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.weights_root import hash_span, span_tensors
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof, public_key_bytes
from nesa_node.swarm.protocol.attest_messages import ATTEST_PROTOCOL, Attest, Attested
from nesa_node.swarm.protocol.messages import Busy, ErrorMessage
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.verification.attestation.binding import NONCE_BYTES
from nesa_node.verification.attestation.check import check_attestation
from nesa_node.verification.attestation.policy import AttestationPolicy

log = get_logger(__name__)

ATTESTED_FOR_S = 600.0
"""Seconds for which a node is not asked again."""
ANSWER_TIMEOUT_S = 90.0
"""Longest wait for a node's quotes: hardware makes one at a time, in up to seconds."""
MAX_REMEMBERED = 1024


class Attestor:
    """Asks nodes of one model for quotes, and checks these by a policy.

    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        checkpoint: Checkpoint,
        policy: AttestationPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm = swarm
        self._model_id = model_id
        self._checkpoint = checkpoint
        self._policy = policy
        self._clock = clock
        self._attested: LruTable[PeerId, tuple[Span, float]] = LruTable(MAX_REMEMBERED)
        self._digests: dict[str, bytes] = {}
        self._hashing = asyncio.Lock()

    async def require(self, peer: PeerId, span: Span, addresses: Sequence[str]) -> None:
        """Have `peer` prove its hardware, its software, and the weights of `span`.

        Not again within `ATTESTED_FOR_S`. Raises `RefusedError("unattested")`, which says what is
        wrong.
        """
        known = self._attested.get(peer)
        if known is not None and known[0].covers(span) and self._clock() < known[1]:
            return
        try:
            with track_wait("the node to attest its hardware", blocks=(span,), peers=(peer,)):
                answer, nonce = await self._ask(peer, addresses)
                attested = await self._check(peer, answer, nonce)
            if not attested.covers(span):
                raise AttestationError("binding", f"it attests blocks {attested}, not {span}")
        except (AttestationError, PeerUnreachableError, ProtocolError) as error:
            log.warning("node_not_attested", peer=peer, reason=str(error))
            raise RefusedError(
                "unattested", f"the policy of --require-attestation excludes {peer}: {error}"
            ) from None
        self._attested.put(peer, (attested, self._clock() + ATTESTED_FOR_S))

    async def _ask(self, peer: PeerId, addresses: Sequence[str]) -> tuple[Attested, bytes]:
        """Its answer, and the nonce in it. Raises `PeerUnreachableError`, `ProtocolError`."""
        nonce, transport = secrets.token_bytes(NONCE_BYTES), self._swarm.transport
        reader, writer = await transport.open_stream(peer, ATTEST_PROTOCOL, addresses)
        stream = Stream(peer, reader, writer)
        try:
            proof = adapter_proof(self._swarm.notices.membership, transport.peer_id, peer)
            await stream.send(Attest(model=self._model_id, membership=proof, nonce=nonce))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                message, _ = await stream.receive()
        except TimeoutError:
            raise PeerUnreachableError(f"it sent no quotes for {ANSWER_TIMEOUT_S:.0f} s") from None
        finally:
            await stream.close()
        match message:
            case Attested():
                return message, nonce
            case ErrorMessage():
                raise RemoteError(message.code, message.message)
            case Busy():
                raise RemoteError("busy", message.message)
        raise ProtocolError("unexpected", "it answered with another message than attested")

    async def _check(self, peer: PeerId, answer: Attested, nonce: bytes) -> Span:
        """The span that was attested. Raises `AttestationError`."""
        start, end = answer.blocks
        if not 0 <= start < end <= self._checkpoint.num_blocks:
            raise AttestationError("malformed", f"it attests blocks {start}:{end}")
        span = Span(start, end)
        expected = await self._expected_root(span)
        if expected is None and not self._policy.unknown_weights:
            raise AttestationError(
                "absent",
                f"this machine does not have the weights of blocks {span}, to compare with those "
                "that were attested; unknown_weights = true in the policy trusts the node's",
            )
        if expected is not None and expected != answer.weights_root:
            raise AttestationError("binding", f"its weights of blocks {span} are not this model's")
        found = await asyncio.to_thread(
            check_attestation,
            [part.to_quote() for part in answer.quotes],
            public_key_bytes(peer),
            nonce,
            answer.weights_root,
            self._policy,
            time.time(),
        )
        kinds = [f"{each.kind}: {each.status}" for each in found]
        log.info("node_attested", peer=peer, blocks=str(span), quotes=", ".join(kinds))
        return span

    async def _expected_root(self, span: Span) -> bytes | None:
        """The root of the model's weights; None if this machine would have to download some."""
        async with self._hashing:
            return await asyncio.to_thread(self._hash_own, span)

    def _hash_own(self, span: Span) -> bytes | None:
        names = span_tensors(self._checkpoint, span)
        if sum(self._checkpoint.download_sizes(names).values()):
            return None
        return hash_span(self._checkpoint, span, self._digests)
