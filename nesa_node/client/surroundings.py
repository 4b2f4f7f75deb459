"""How far a client is from nodes, and they from each other."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.swarm.node import Swarm
from nesa_node.topology.assemble import assemble_links
from nesa_node.topology.estimate import fill
from nesa_node.topology.links import Links
from nesa_node.topology.snapshot import NodeState, Snapshot

MAX_PINGED = 8
"""Candidates for the first hop, and as many for the last, that are asked at once."""
FRESH_S = 60.0
_PATIENCE_S = 1.0
_LINKS_FRESH_S = 15.0
"""Links change slowly, and to guess those that nobody measured takes time."""


class Surroundings:
    """What a client has measured itself, and makes of what nodes say."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._links: Links | None = None
        self._made_at = -math.inf

    async def look(
        self, snapshot: Snapshot, span: Span, *, may_ask: bool = True
    ) -> tuple[Snapshot, Mapping[PeerId, float]]:
        """`snapshot` with all its links, and the client's round trips to its nodes in ms.

        With `may_ask`, nodes that could begin or end a chain over `span` are pinged, where there is
        a choice and that was not done lately. What nobody has measured is estimated.
        """
        if may_ask:
            await self._ping_ends(snapshot, span)
        own = self._swarm.identity.peer_id
        peers = [node.peer_id for node in (*snapshot.nodes, *snapshot.joining)]
        links = await self._linked(snapshot, peers)
        rtt_ms = dict(zip(peers, links.of([own, *peers]).rtt_ms_NN[0, 1:].tolist(), strict=True))
        for peer in peers:
            if not math.isnan(measured := self._swarm.distances.rtt_ms(peer)):
                rtt_ms[peer] = measured
        return replace(snapshot, links=links), rtt_ms

    async def _ping_ends(self, snapshot: Snapshot, span: Span) -> None:
        distances = self._swarm.distances
        asked: dict[PeerId, Sequence[str]] = {}
        for end in (span.start, span.end - 1):
            holders = [node for node in snapshot.nodes if node.span.start <= end < node.span.end]
            if len(holders) < 2:
                continue
            due = [node for node in holders if distances.age_s(node.peer_id) > FRESH_S]
            for node in sorted(due, key=self._expected_ms)[:MAX_PINGED]:
                asked[node.peer_id] = node.addresses
        if asked:
            await distances.measure(self._swarm.transport, asked, timeout_s=_PATIENCE_S)
            self._made_at = -math.inf

    def _expected_ms(self, node: NodeState) -> tuple[float, PeerId]:
        """The nearest first, by what is known; in a strange network by peer id, so at random."""
        own = self._swarm.identity.peer_id
        links = self._links
        rtt_ms = math.nan if links is None else links.rtt_ms(own, node.peer_id)
        return math.inf if math.isnan(rtt_ms) else rtt_ms, node.peer_id

    async def _linked(self, snapshot: Snapshot, peers: Sequence[PeerId]) -> Links:
        """Links among `peers` and this client."""
        own = self._swarm.identity.peer_id
        now = time.monotonic()
        known = self._links
        if known is None or now - self._made_at > _LINKS_FRESH_S or not {*peers} <= {*known.peers}:
            said = self._swarm.directory.measured(snapshot)
            said[own] = self._swarm.distances.measured(self._swarm.speeds)
            places = {node.peer_id: node.location for node in (*snapshot.nodes, *snapshot.joining)}
            links = assemble_links(said)
            if np.isnan(links.rtt_ms_NN).any():
                locations = [places.get(peer) for peer in links.peers]
                rng = np.random.default_rng(0)
                links = await asyncio.to_thread(fill, links, locations, rng)
            self._links, self._made_at = links, now
            known = links
        return known
