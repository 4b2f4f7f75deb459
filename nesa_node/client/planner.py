"""Planning of chains, with what the client has learned about nodes in all its sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.client.closed_doors import ClosedDoors
from nesa_node.client.decisions import describe
from nesa_node.client.lookup import Lookup
from nesa_node.client.request import RouteRequest
from nesa_node.client.surroundings import Surroundings
from nesa_node.compression import tensors
from nesa_node.core.decision_log import Decision, DecisionLog
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.avoidance import Avoidance
from nesa_node.routing.build import Request
from nesa_node.routing.chains import Hop, chain_cost_s
from nesa_node.routing.claims import LIE, Claims
from nesa_node.routing.repair import fill_gaps
from nesa_node.routing.reputation import blame_penalty_s
from nesa_node.routing.strategies import DEFAULT, Greedy, make_session_strategy
from nesa_node.routing.tuned import TUNED
from nesa_node.routing.tuner import believed
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notices import Placement
from nesa_node.swarm.tasks import TaskSet
from nesa_node.topology.links import Links
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

Hops = tuple[Hop, ...]
Audit = Callable[[NodeState, RouteRequest], Awaitable[float | None]]
"""Measures the tokens/s that a node decodes; None if that fails."""

AUDIT_EVERY_S = 600.0
"""Seconds between audits of a node, which cost it work."""
AUDIT_AGAIN_S = 30.0
"""Seconds until the next audit after a failed one."""
MAX_PUBLISHED = 3
"""Most sets of published exponents that are tried, of the longest known orchestrators: each costs
planning time."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Input of planning: snapshot with links, the client's round trips (ms), weighed reports."""

    snapshot: Snapshot
    rtt_ms: Mapping[PeerId, float]
    blames: Mapping[PeerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    hops: Hops
    asked: Request


class Planner:
    """Plans chains for all sessions of a client. `clock` returns monotonic seconds."""

    def __init__(
        self,
        swarm: Swarm,
        strategy: str = DEFAULT,
        *,
        decisions: DecisionLog | None = None,
        audit: Audit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` for an unknown strategy. Without `audit`, announced speeds are
        believed.
        """
        self._swarm = swarm
        self._clock = clock
        self._audit_at: dict[PeerId, float] = {}
        self._audit = audit
        self.strategy = make_session_strategy(strategy, np.random.default_rng())
        self._decisions = decisions
        self._writing = TaskSet()
        self.avoidance = Avoidance(clock)
        self.claims = Claims(clock)
        self.closed_doors = ClosedDoors(clock)
        self.lookup = Lookup(swarm)
        self.surroundings = Surroundings(swarm)

    async def view(self, snapshot: Snapshot, request: RouteRequest, *, may_ask: bool) -> View:
        """Planning view of `snapshot`, with announced speeds corrected by measurements.

        With `may_ask`, candidates are pinged first unless there is only one. In a star all traffic
        passes the client: the round trip between nodes is the sum of their round trips to it.
        """
        if request.only is not None and len(request.only) == 1:
            # A single candidate needs no links.
            return View(snapshot, {})
        if may_ask and isinstance(self.strategy, Greedy):
            self.strategy = await self._tuned(self.strategy, request.model_id)
        linked, rtt_ms = await self.surroundings.look(snapshot, request.span, may_ask=may_ask)
        nodes = tuple(self.claims.believed(node) for node in linked.nodes)
        if request.mode == "star":
            linked = replace(linked, links=_through_client(rtt_ms, [n.peer_id for n in nodes]))
        blames = self._swarm.directory.blames(request.model_id)
        return View(replace(linked, nodes=nodes), rtt_ms, blames)

    async def _tuned(self, rule: Greedy, model_id: ModelId) -> Greedy:
        """The rule with the exponents that orchestrators publish, within plausible bounds."""
        placements = await self._swarm.notices.fetch(Placement, model_id)
        known_s = self._swarm.notices.acquaintance.known_s
        told = [each for each in placements if each.exponents is not None]
        told.sort(key=lambda each: known_s(each.signer), reverse=True)
        found = (believed(each.exponents.values, TUNED) for each in told if each.exponents)
        published = dict.fromkeys(parameters for parameters in found if parameters is not None)
        return replace(rule, published=tuple(published)[:MAX_PUBLISHED])

    def plan(
        self,
        view: View,
        request: RouteRequest,
        keep: Sequence[Hop],
        *,
        exclude: frozenset[PeerId],
        min_free_tokens: int,
    ) -> Plan:
        """Plan hops that include `keep`. Raises `MissingBlocksError`."""
        asked = replace(self.asked(view, request), exclude=exclude, min_free_tokens=min_free_tokens)
        hops = fill_gaps(view.snapshot, asked, keep, choose=self.strategy.choose)
        return Plan(hops, asked)

    async def recheck(self, snapshot: Snapshot, request: RouteRequest, hops: Hops) -> None:
        """Ping the nodes of `hops`, and audit their speed if that is due.

        Nodes that announce far more than the measured speed are reported.
        """
        used = {hop.peer_id for hop in hops}
        nodes = [node for node in snapshot.nodes if node.peer_id in used]
        await self.surroundings.measure(nodes)
        for node in nodes:
            if self._audit is not None and self._clock() >= self._audit_at.get(node.peer_id, 0.0):
                self._audit_at[node.peer_id] = self._clock() + AUDIT_EVERY_S
                tokens_per_s = await self._audit(node, request)
                if tokens_per_s is None:
                    self.claims.unmeasurable(node)
                    self._audit_at[node.peer_id] = self._clock() + AUDIT_AGAIN_S
                    continue
                # Scaled to the idle node: planning accounts for its load separately.
                idle_tokens_per_s = tokens_per_s * (1 + node.load)
                log.info("node_audited", peer=node.peer_id, tokens_per_s=idle_tokens_per_s)
                self.claims.measured(node.peer_id, idle_tokens_per_s)
                if node.decode_tokens_per_s > LIE * idle_tokens_per_s:
                    self._swarm.reporter.note(request.model_id, node.peer_id, "slow")

    def step_s(self, view: View, request: RouteRequest, hops: Hops) -> float | None:
        """Expected seconds of a step through `hops`; None if the view lacks one of their nodes."""
        held = {node.peer_id: node.span for node in view.snapshot.nodes}
        if not all(hop.peer_id in held and held[hop.peer_id].covers(hop.span) for hop in hops):
            return None
        return chain_cost_s(view.snapshot, self.asked(view, request), hops)

    def without_own_load(
        self, view: View, hops: Hops, request: RouteRequest, step_s: float
    ) -> View:
        """`view` with the load subtracted that a session over `hops` itself causes.

        Its steps take `step_s`. Otherwise any idle node would look better than a node the session
        keeps busy.
        """
        lengths = {hop.peer_id: len(hop.span) for hop in hops}

        def relieved(node: NodeState) -> NodeState:
            length = lengths.get(node.peer_id)
            if length is None or node.decode_tokens_per_s <= 0:
                return node
            compute_s = request.rows * length / (node.decode_tokens_per_s * len(node.span))
            return replace(node, load=max(node.load - compute_s / step_s, 0.0))

        nodes = tuple(relieved(node) for node in view.snapshot.nodes)
        return replace(view, snapshot=replace(view.snapshot, nodes=nodes))

    def decided(self, session: bytes, reason: str, view: View, asked: Request, hops: Hops) -> None:
        """Record in the background why `session` got `hops`."""
        known = {node.peer_id: node.span for node in view.snapshot.nodes}
        if self._decisions is not None and all(
            hop.peer_id in known and known[hop.peer_id].covers(hop.span) for hop in hops
        ):
            self._writing.start(
                self._write(self._decisions, session, reason, view, asked, hops), name="decision"
            )

    async def close(self) -> None:
        """Cancel pending writes and fetches."""
        await self.lookup.close()
        await self._writing.close()

    async def _write(
        self,
        decisions: DecisionLog,
        session: bytes,
        reason: str,
        view: View,
        asked: Request,
        hops: Hops,
    ) -> None:
        def write() -> None:
            body = describe(view.snapshot, asked, hops, self.strategy, reason)
            decisions.add(Decision("session", session.hex(), time.time(), body))

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            log.warning("decision_not_kept", reason=str(error))

    def asked(self, view: View, request: RouteRequest) -> Request:
        """Routing request for one decoded token of the session."""
        penalties_s = {
            node.peer_id: penalty_s
            for node in view.snapshot.nodes
            if (penalty_s := self._penalty_s(node.peer_id, view)) > 0
        }
        return Request(
            span=request.span,
            bytes_per_token=request.hidden_size * tensors.DTYPES[request.dtype].itemsize,
            entry_rtt_ms=view.rtt_ms,
            penalties_s=penalties_s,
        )

    def _penalty_s(self, peer: PeerId, view: View) -> float:
        """Penalty for failures that this client has seen and for reports by other peers."""
        return self.avoidance.penalty(peer) + blame_penalty_s(view.blames.get(peer, 0.0))


def _through_client(rtt_ms: Mapping[PeerId, float], peers: Sequence[PeerId]) -> Links:
    links = Links.unknown(peers)
    rtt_ms_N = np.array([rtt_ms[peer] for peer in peers])
    rtt_ms_NN = rtt_ms_N[:, None] + rtt_ms_N[None, :]
    np.fill_diagonal(rtt_ms_NN, 0.0)
    return replace(links, rtt_ms_NN=rtt_ms_NN)
