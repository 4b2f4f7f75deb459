"""What a client has measured of nodes: latencies, and refusals in spite of announced cache."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

import numpy as np

from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.node import Swarm
from nesa_node.topology.links.estimate import fill_links
from nesa_node.topology.links.matrix import Links, MeasuredLink, assemble_links
from nesa_node.topology.shape.stability import (
    MAX_HEIGHTS,
    ConnectionHeights,
    connection_heights,
    node_stability,
)
from nesa_node.topology.snapshot import NodeState, Snapshot

MIN_REFUSED_RECORDS = 3
"""Number of records with free cache, each followed by a refusal, before a report."""
REFUSAL_WINDOW_S = 600.0
"""Seconds after which a refusal no longer counts."""
_MAX_TRACKED_PEERS = 1024


MAX_STABILITY_NODES = 2000
"""Nodes above which stability is not computed: its time is quadratic in them."""


class ClosableLink(Protocol):
    """A session's link to a node."""

    @property
    def closed(self) -> bool: ...


class RefusalTracker:
    """Refusal counts by peer, shared by all sessions of a client. `clock` is monotonic seconds.

    A record is some seconds old, so that a single refusal proves nothing. Refusals by a node that
    already serves this client do not count: its quota per client may be used up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: OrderedDict[PeerId, dict[int, float]] = OrderedDict()
        self._links: dict[PeerId, WeakSet[ClosableLink]] = {}

    def record_accepted(self, peer: PeerId, link: ClosableLink) -> None:
        """Note that `peer` opened a session, which lasts until `link` is closed."""
        self._refused.pop(peer, None)
        self._links = {each: links for each, links in self._links.items() if _any_open(links)}
        self._links.setdefault(peer, WeakSet()).add(link)

    def record_refusal(self, peer: PeerId, record_seq: int) -> bool:
        """Note that `peer` refused although its record with sequence number `record_seq` had room.

        Returns whether to report the peer: it has refused after `MIN_REFUSED_RECORDS` of its
        records within `REFUSAL_WINDOW_S` and opened no session since. The count then starts again.
        """
        if _any_open(self._links.get(peer, WeakSet())):
            return False
        now = self._clock()
        seen = self._refused.pop(peer, {})
        seen = {number: at for number, at in seen.items() if now - at < REFUSAL_WINDOW_S}
        seen[record_seq] = now
        if len(seen) >= MIN_REFUSED_RECORDS:
            return True
        self._refused[peer] = seen
        if len(self._refused) > _MAX_TRACKED_PEERS:
            self._refused.popitem(last=False)
        return False


def _any_open(links: WeakSet[ClosableLink]) -> bool:
    return any(not link.closed for link in links)


MAX_PINGED = 8
"""Most candidates for the first hop, and for the last one, that are pinged at once."""
RTT_FRESH_S = 60.0
_PING_TIMEOUT_S = 1.0
_LINKS_FRESH_S = 15.0
"""Seconds for which assembled links are used: links change slowly, and estimating unmeasured ones
takes time."""


class LatencyView:
    """Latencies by the client's pings, the nodes' records, and estimates."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._links: Links | None = None
        self._links_made_at = -math.inf
        self._refresh_lock = asyncio.Lock()
        self._heights: deque[ConnectionHeights] = deque(maxlen=MAX_HEIGHTS)
        self.stability: Mapping[PeerId, float] = {}
        """Of the nodes at the last refresh, if that was asked for; else empty."""

    async def add_links(
        self,
        snapshot: Snapshot,
        span: Span,
        *,
        may_ping: bool = True,
        with_stability: bool = False,
    ) -> tuple[Snapshot, Mapping[PeerId, float]]:
        """`snapshot` with its links, and the client's round trips to its nodes in ms.

        With `may_ping`, candidates for both ends of a chain over `span` are pinged, where there are
        at least two and the last ping is older than `RTT_FRESH_S`, and unmeasured links are
        estimated. Without it, returns at once with what is known. NaN for unknown round trips.
        `with_stability` updates `stability` whenever links are assembled anew.
        """
        if may_ping:
            async with self._refresh_lock:
                await self._ping_ends(snapshot, span)
                await self._refresh_links(snapshot, with_stability)
        rtt_ms = {}
        for node in (*snapshot.nodes, *snapshot.joining):
            measured_ms = self._swarm.rtts.rtt_ms(node.peer_id)
            unknown = math.isnan(measured_ms)
            rtt_ms[node.peer_id] = self._estimated_ms(node.peer_id) if unknown else measured_ms
        return replace(snapshot, links=self._links), rtt_ms

    def _estimated_ms(self, peer: PeerId) -> float:
        links = self._links
        return math.nan if links is None else links.rtt_ms(self._swarm.identity.peer_id, peer)

    async def ping_nodes(self, nodes: Sequence[NodeState]) -> None:
        """Ping `nodes` now."""
        asked = {node.peer_id: node.addresses for node in nodes}
        await self._swarm.rtts.ping_all(self._swarm.transport, asked, timeout_s=_PING_TIMEOUT_S)
        self._links_made_at = -math.inf

    async def _ping_ends(self, snapshot: Snapshot, span: Span) -> None:
        distances = self._swarm.rtts
        asked: dict[PeerId, NodeState] = {}
        for end in (span.start, span.end - 1):
            holders = [node for node in snapshot.nodes if node.span.start <= end < node.span.end]
            if len(holders) < 2:
                continue
            due = [node for node in holders if distances.is_due(node.peer_id, RTT_FRESH_S)]
            for node in sorted(due, key=self._expected_ms)[:MAX_PINGED]:
                asked[node.peer_id] = node
        if asked:
            await self.ping_nodes(list(asked.values()))

    def _expected_ms(self, node: NodeState) -> tuple[float, PeerId]:
        """Sort key: known round trip, then peer id, which is random in an unknown network."""
        rtt_ms = self._estimated_ms(node.peer_id)
        return math.inf if math.isnan(rtt_ms) else rtt_ms, node.peer_id

    async def _refresh_links(self, snapshot: Snapshot, with_stability: bool) -> None:
        """Assemble the links among all nodes and this client if outdated or incomplete."""
        nodes = (*snapshot.nodes, *snapshot.joining)
        known, now = self._links, time.monotonic()
        is_fresh = now - self._links_made_at < _LINKS_FRESH_S
        if is_fresh and known is not None and {n.peer_id for n in nodes} <= {*known.peers}:
            return
        said = self._swarm.directory.measured_links(snapshot)
        said[self._swarm.identity.peer_id] = self._swarm.rtts.nearest_links(self._swarm.link_speeds)
        places = {node.peer_id: node.location for node in nodes}
        self._links = await asyncio.to_thread(_assemble_all_links, said, places)
        self._links_made_at = now
        if with_stability and len(snapshot.nodes) <= MAX_STABILITY_NODES:
            linked = replace(snapshot, links=self._links)
            self._heights.append(await asyncio.to_thread(connection_heights, linked))
            peers = [node.peer_id for node in snapshot.nodes]
            self.stability = node_stability(self._heights, peers)


def _assemble_all_links(
    said: Mapping[PeerId, Sequence[MeasuredLink]],
    places: Mapping[PeerId, tuple[float, float] | None],
) -> Links:
    """Assemble all links and estimate unmeasured ones: takes seconds for thousands of nodes."""
    links = assemble_links(said)
    if np.isnan(links.rtt_ms_NN).any():
        locations = [places.get(peer) for peer in links.peers]
        links = fill_links(links, locations, np.random.default_rng(0))
    return links
