"""Rejoining the DHT after all its members, or the connection to them, were lost.

A node removes a member from its routing table after one unanswered call and does not call it for a
while, so that without rejoining a short loss of network would split the DHT permanently.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht.member import MemberNode
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.p2p.hivemind_imports import PeerID
from nesa_node.swarm.p2p.transport import Transport

log = get_logger(__name__)

_REJOIN_INTERVAL_S = 15.0
_PING_TIMEOUT_S = 3.0
_FAILED_ATTEMPT_PAUSE_S = 0.5
"""Pause after a failed attempt. An isolated node that reads continuously would otherwise ping
continuously, and members refuse calls beyond its budget (`rpc.py`)."""
_MAX_BLACKLISTED_PEERS = 4096
_FIRST_RECORDS = 4
_SAMPLED_RECORDS = 4
"""Randomly chosen records beside the first ones, which may all be stale or hostile."""


class DhtRejoiner:
    """Pings lost initial peers, and nodes with remembered records, to rejoin the DHT."""

    def __init__(
        self,
        node: MemberNode,
        transport: Transport,
        initial_peers: Mapping[PeerId, Sequence[str]],
    ) -> None:
        self._node = node
        self._transport = transport
        self._initial_peers = initial_peers
        self._attempt: asyncio.Task[bool] | None = None
        self._failed = False
        self._paused_until = 0.0

    @property
    def is_isolated(self) -> bool:
        """Whether this node's routing table is empty."""
        return not self._node.protocol.routing_table.uid_to_peer_id

    async def run(self) -> None:
        """Ping lost initial peers every `_REJOIN_INTERVAL_S`, until cancelled."""
        try:
            while True:
                await asyncio.sleep(_REJOIN_INTERVAL_S)
                if len(self._node.blacklist.ban_counter) > _MAX_BLACKLISTED_PEERS:
                    self._node.blacklist.clear()
                await self.start_attempt()
        finally:
            if self._attempt is not None:
                self._attempt.cancel()

    def start_attempt(self, records: Iterable[NodeRecord] = ()) -> asyncio.Task[bool]:
        """Start an attempt: ping initial peers that are not known now, and nodes of `records`.

        Of `records`, which are ordered by when their nodes were first seen, the first and a few
        random ones are chosen, not the newest: a record's age is whatever its signer claims.

        The task's result is False if no peer answers. While an attempt runs, and shortly after a
        failed one, the existing task is returned.
        """
        is_resting = self._failed and time.monotonic() < self._paused_until
        if self._attempt is None or (self._attempt.done() and not is_resting):
            self._attempt = asyncio.create_task(
                self._attempt_rejoin(records), name="dht-rejoin-now"
            )
        return self._attempt

    async def rejoin(self, records: Iterable[NodeRecord]) -> bool:
        """Start an attempt and wait for it, unless the last one failed.

        An isolated node thus does not wait for unreachable peers at every read.
        """
        attempt = self.start_attempt(records)
        return not self._failed and await asyncio.shield(attempt)

    async def _attempt_rejoin(self, records: Iterable[NodeRecord]) -> bool:
        known = self._node.protocol.routing_table
        remembered = list(records)
        later = remembered[_FIRST_RECORDS:]
        drawn = random.sample(later, min(_SAMPLED_RECORDS, len(later)))
        meetings = [
            self._ping_member(
                name, partial(self._transport.connect, name, addresses, _PING_TIMEOUT_S)
            )
            for name, addresses in self._initial_peers.items()
            if PeerID.from_base58(name) not in known
        ]
        for record in remembered[:_FIRST_RECORDS] + drawn:
            name = record.signer
            dial = partial(self._transport.dial, name, record.addresses, _PING_TIMEOUT_S)
            meetings.append(self._ping_member(name, dial))
        found = any(await asyncio.gather(*meetings))
        self._failed = self.is_isolated
        self._paused_until = time.monotonic() + _FAILED_ATTEMPT_PAUSE_S
        return found

    async def _ping_member(self, name: PeerId, dial: Callable[[], Awaitable[None]]) -> bool:
        peer = PeerID.from_base58(name)
        with suppress(PeerUnreachableError):
            await dial()
            if await self._node.protocol.call_ping(peer) is not None:
                self._node.blacklist.register_success(peer)
                log.info("dht_rejoined", peer=name)
                return True
        return False
