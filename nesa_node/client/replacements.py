"""Search for nodes that could replace silent hops, while their answers are still awaited.

Nothing is opened: a false alarm costs each candidate a ping. Candidates that answer are already
connected when the chain is repaired, and the rest is not tried.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from nesa_node.client.nodes import Nodes
from nesa_node.client.planner import Hops
from nesa_node.client.request import RouteRequest
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.ping import ping
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

ANSWER_S = 2.0
"""Timeout of connecting to a candidate and pinging it, in seconds."""
AGAIN_S = 1.0
"""Seconds between rounds while no replacement is found."""
MOST_ASKED = 24
"""Most candidates that are pinged, the nearest first: each may cost a new connection."""


class ReplacementSearch:
    """Search for replacements of the hops that are silent now, one at a time."""

    def __init__(self, swarm: Swarm, request: RouteRequest, nodes: Nodes) -> None:
        self.replaceable: frozenset[PeerId] = frozenset()
        """Hops that nodes which have answered could replace; empty until such nodes are found."""
        self._swarm = swarm
        self._request = request
        self._nodes = nodes
        self._silent: frozenset[PeerId] = frozenset()
        self._choices: tuple[frozenset[PeerId], ...] = ()
        self._asked: set[PeerId] = set()
        self._answered: set[PeerId] = set()
        self._task: asyncio.Task[None] | None = None
        self._stopped: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended."""

    @property
    def found(self) -> bool:
        """Whether nodes that have answered could repair the chain."""
        return bool(self.replaceable)

    @property
    def silent(self) -> frozenset[PeerId]:
        """Silent nodes to be replaced."""
        return self._silent

    def begin(self, hops: Hops, *choices: frozenset[PeerId]) -> None:
        """Search for nodes that could replace all hops of one of `choices`.

        A running search for the same choices continues. Several choices mean that replacing any one
        of them suffices.
        """
        if choices != self._choices:
            self._stop()
            self._choices, self._silent = choices, frozenset().union(*choices)
            self.replaceable = frozenset()
            self._task = asyncio.create_task(self._search(hops), name="replacement-search")

    def end(self) -> None:
        """End the search and forget its result: no hop is silent, or the chain is repaired."""
        self._stop()
        self._choices, self._silent, self.replaceable = (), frozenset(), frozenset()
        self._asked.clear()
        self._answered.clear()

    def settle(self) -> frozenset[PeerId]:
        """Exclude candidates that did not answer from the next plan; return them."""
        unreachable = frozenset(self._asked - self._answered)
        self._nodes.avoid(unreachable)
        return unreachable

    async def close(self) -> None:
        """End the search and wait for its tasks."""
        self.end()
        await asyncio.gather(*self._stopped, return_exceptions=True)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._stopped.add(self._task)
            self._task.add_done_callback(self._stopped.discard)
            self._task = None

    async def _search(self, hops: Hops) -> None:
        lost = [hop.span for hop in hops if hop.peer_id in self._silent]
        try:
            while not self.found:
                snapshot = await self._nodes.glance()
                near = self._candidates(snapshot, lost, {hop.peer_id for hop in hops})
                async with asyncio.TaskGroup() as asking:
                    for node in near:
                        asking.create_task(self._ask(node, snapshot, hops))
                if not self.found:
                    await asyncio.sleep(AGAIN_S)
        except Exception:  # edge of a task: the session still repairs its chain without it
            log.exception("replacement_search_failed")

    def _candidates(
        self, snapshot: Snapshot, lost: Sequence[Span], used: set[PeerId]
    ) -> list[NodeState]:
        """Nodes that hold some of the lost blocks, the nearest first."""
        rtt_ms = self._swarm.distances.rtt_ms
        holders = [
            node
            for node in snapshot.nodes
            if node.peer_id not in used and any(_overlap(node.span, span) for span in lost)
        ]
        return sorted(
            holders, key=lambda n: (math.isnan(rtt_ms(n.peer_id)), rtt_ms(n.peer_id), n.peer_id)
        )[:MOST_ASKED]

    async def _ask(self, node: NodeState, snapshot: Snapshot, hops: Hops) -> None:
        self._asked.add(node.peer_id)
        if node.peer_id not in self._answered:
            try:
                await ping(
                    self._swarm.transport,
                    node.peer_id,
                    node.addresses,
                    timeout_s=ANSWER_S,
                    pings=1,
                )
            except (PeerUnreachableError, OSError):
                return
            self._answered.add(node.peer_id)
        for gone in self._choices:
            kept = tuple(hop for hop in hops if hop.peer_id not in gone)
            if not self.found and await self._nodes.can_fill(snapshot, kept, self._answered):
                self.replaceable = gone


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
