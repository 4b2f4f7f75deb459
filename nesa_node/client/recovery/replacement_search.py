"""Search for nodes that could replace silent hops, while their answers are still awaited.

Nothing is opened: a false alarm costs each candidate a ping. Candidates that answer are already
connected when the chain is repaired, and the rest is not tried.
"""

from __future__ import annotations

import asyncio
import math

from nesa_node.client.routing.node_selection import NodeSelector, nodes_with
from nesa_node.client.routing.planner import Hops
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.link_measurements import ping
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

CANDIDATE_PING_TIMEOUT_S = 2.0
"""Timeout of connecting to a candidate and pinging it, in seconds."""
SEARCH_INTERVAL_S = 1.0
"""Seconds between rounds while no replacement is found."""
MAX_PINGED_CANDIDATES = 24
"""Most candidates that are pinged, the nearest first: each may cost a new connection."""


class ReplacementSearch:
    """Search for replacements of the hops that are silent now, one at a time."""

    def __init__(self, swarm: Swarm, selector: NodeSelector) -> None:
        self.replaceable: frozenset[PeerId] = frozenset()
        """Hops that nodes which have answered could replace; empty until such nodes are found."""
        self.silent_peers: frozenset[PeerId] = frozenset()
        """Silent nodes to be replaced."""
        self._swarm = swarm
        self._selector = selector
        self._choices: tuple[frozenset[PeerId], ...] = ()
        self._pinged: set[PeerId] = set()
        self._answered: set[PeerId] = set()
        self._task: asyncio.Task[None] | None = None
        self._cancelled_tasks: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended."""

    @property
    def has_found(self) -> bool:
        """Whether nodes that have answered could repair the chain."""
        return bool(self.replaceable)

    def start(self, hops: Hops, *choices: frozenset[PeerId]) -> None:
        """Search for nodes that could replace all hops of one of `choices`.

        A running search for the same choices continues. Several choices mean that replacing any one
        of them suffices.
        """
        if choices != self._choices:
            self._cancel_task()
            self._choices, self.silent_peers = choices, frozenset().union(*choices)
            self.replaceable = frozenset()
            self._task = asyncio.create_task(self._search(hops), name="replacement-search")

    def stop(self) -> None:
        """End the search and forget its result: no hop is silent, or the chain is repaired."""
        self._cancel_task()
        self._choices, self.silent_peers, self.replaceable = (), frozenset(), frozenset()
        self._pinged.clear()
        self._answered.clear()

    def exclude_unreachable(self) -> frozenset[PeerId]:
        """Exclude candidates that did not answer from the next plan; return them."""
        unreachable = frozenset(self._pinged - self._answered)
        self._selector.exclude_for_a_while(unreachable)
        return unreachable

    async def close(self) -> None:
        """End the search and wait for its tasks."""
        self.stop()
        await asyncio.gather(*self._cancelled_tasks, return_exceptions=True)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._cancelled_tasks.add(self._task)
            self._task.add_done_callback(self._cancelled_tasks.discard)
            self._task = None

    async def _search(self, hops: Hops) -> None:
        try:
            while not self.has_found:
                snapshot = await self._selector.fetch_from_one_member()
                async with asyncio.TaskGroup() as asking:
                    for node in self._candidates(snapshot, hops):
                        asking.create_task(self._ping_candidate(node, snapshot, hops))
                if not self.has_found:
                    await asyncio.sleep(SEARCH_INTERVAL_S)
        except Exception:  # edge of a task: the session still repairs its chain without it
            log.exception("replacement_search_failed")

    def _candidates(self, snapshot: Snapshot, hops: Hops) -> list[NodeState]:
        """Nodes outside `hops` that hold some of the silent nodes' blocks, the nearest first."""
        rtt_ms = self._swarm.rtts.rtt_ms
        used = {hop.peer_id for hop in hops}
        lost = [(hop.span.start, hop.span.end) for hop in hops if hop.peer_id in self.silent_peers]
        holders = nodes_with(lost, [node for node in snapshot.nodes if node.peer_id not in used])
        return sorted(
            holders, key=lambda n: (math.isnan(rtt_ms(n.peer_id)), rtt_ms(n.peer_id), n.peer_id)
        )[:MAX_PINGED_CANDIDATES]

    async def _ping_candidate(self, node: NodeState, snapshot: Snapshot, hops: Hops) -> None:
        self._pinged.add(node.peer_id)
        if node.peer_id not in self._answered:
            try:
                await ping(
                    self._swarm.transport,
                    node.peer_id,
                    node.addresses,
                    timeout_s=CANDIDATE_PING_TIMEOUT_S,
                    pings=1,
                )
            except (PeerUnreachableError, OSError):
                return
            self._answered.add(node.peer_id)
        for gone in self._choices:
            kept = tuple(hop for hop in hops if hop.peer_id not in gone)
            if not self.has_found and await self._selector.can_fill(snapshot, kept, self._answered):
                self.replaceable = gone
