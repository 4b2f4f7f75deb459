"""A node's answers to peers that ask it to attest its hardware."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from nesa_node.core.errors import (
    AttestationError,
    BusyError,
    ConfigError,
    ProtocolError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.server.attestation.quote_sources import QuoteSource
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message
from nesa_node.server.session.peer_access import PeerAccess
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import public_key_bytes
from nesa_node.swarm.protocol.any_message import encode_message
from nesa_node.swarm.protocol.attest_messages import Attest, Attested, QuotePart
from nesa_node.swarm.protocol.stream import MAX_HEADER_BYTES, Stream
from nesa_node.verification.attestation.binding import report_data

log = get_logger(__name__)

MAX_WAITING = 16
"""Requests that wait for the hardware, which makes one quote at a time."""
MAX_WAITING_PER_PEER = 2
_BUSY_RETRY_S = 2.0


class AttestationServer:
    """Answers `attest`. Without a `source` it says that this node has none.

    `find_served` gives the span that is served now, and the root of its weights.
    """

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        source: QuoteSource | None,
        find_served: Callable[[], tuple[Span, bytes] | None],
        *,
        allow: frozenset[PeerId] = frozenset(),
        deny: frozenset[PeerId] = frozenset(),
        refusals: RefusalLog | None = None,
    ) -> None:
        self._swarm = swarm
        self._source = source
        self._find_served = find_served
        self._access = PeerAccess(swarm, model_id, allow, deny)
        self._refusals = refusals or RefusalLog()
        self._waiting: Counter[PeerId] = Counter()
        self._turn = asyncio.Lock()

    async def handle(self, peer: PeerId, reader: Any, writer: Any) -> None:
        """Serve one stream, which has one request; the caller closes it.

        A peer's mistake is answered, never raised.
        """
        stream = Stream(peer, reader, writer)
        async with self._refusals.answering(stream):
            # Read before it is refused: see `SessionServer.handle`.
            message = await receive_first_message(stream)
            if not isinstance(message, Attest):
                raise ProtocolError("unexpected", "a stream of attestation begins with attest")
            self._check_request(peer, message)
            await stream.send(await self._attest(peer, message.nonce))

    def _check_request(self, peer: PeerId, message: Attest) -> None:
        self._access.require(peer, message.membership, message.model)
        if self._source is None:
            raise ProtocolError(
                "no_attestation",
                "this node does not attest its hardware (it runs without --attestation, or on "
                "hardware that gives no quotes)",
            )

    async def _attest(self, peer: PeerId, nonce: bytes) -> Attested:
        assert self._source is not None
        if self._waiting.total() >= MAX_WAITING or self._waiting[peer] >= MAX_WAITING_PER_PEER:
            raise BusyError("too many peers ask for quotes", _BUSY_RETRY_S)
        self._waiting[peer] += 1
        try:
            async with self._turn:
                served = self._find_served()
                if served is None:
                    raise BusyError("this node is changing its blocks", _BUSY_RETRY_S)
                span, root = served
                key = public_key_bytes(self._swarm.identity.peer_id)
                quotes = await self._source.quotes(report_data(key, nonce, root))
        except (AttestationError, ConfigError, OSError) as error:
            log.warning("attestation_failed", reason=str(error))
            raise ProtocolError("no_attestation", f"the hardware gave no quote: {error}") from None
        finally:
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]
        answer = Attested(
            blocks=(span.start, span.end),
            weights_root=root,
            quotes=tuple(map(QuotePart.of, quotes)),
        )
        if len(encode_message(answer)) > MAX_HEADER_BYTES:
            raise ProtocolError("no_attestation", "the node's quotes are too large for a message")
        return answer
