"""Planning of chains, with what the client has learned about nodes in all its sessions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from nesa_node.client.routing.measurements import LatencyView, RefusalTracker
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.routing.snapshot_cache import SnapshotCache
from nesa_node.compression import tensors
from nesa_node.compression.codec_cost import CodecLinkCost, fastest_seconds
from nesa_node.compression.codecs import UNCOMPRESSED, candidate_codecs, codec_names
from nesa_node.core.decision_log import DecisionLog, LoggedDecision
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.routing.chain_request import (
    TOKENS_PER_SESSION,
    Chain,
    ChainProblem,
    ChainRequest,
)
from nesa_node.routing.chains import Hop, chain_cost_s, fill_gaps, hops_to_visits, make_problem
from nesa_node.routing.reputation import (
    REPORTABLE_RATIO,
    FailurePenalties,
    SpeedClaims,
    blame_penalty_s,
)
from nesa_node.routing.strategies import (
    DEFAULT_STRATEGY,
    Alternative,
    GreedyStrategy,
    LatencyStrategy,
    Strategy,
    explain,
    make_session_strategy,
    reads_stability,
)
from nesa_node.routing.tuner import Tuning, parse_published
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.link_encoder import link_cost
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

Hops = tuple[Hop, ...]
MeasureSpeed = Callable[[NodeState, RouteRequest], Awaitable[float | None]]
"""Measures the tokens/s that a node decodes; None if that fails."""
RequireAttested = Callable[[PeerId, Span, Sequence[str]], Awaitable[None]]
"""Has a node at these addresses prove its hardware and its weights of a span."""

SPEED_INTERVAL_S = 600.0
"""Seconds between measurements of a node's speed, which cost it work."""
FAILED_MEASUREMENT_INTERVAL_S = 30.0
"""Seconds until the next measurement after a failed one."""
MAX_PUBLISHED_EXPONENTS = 3
"""Most sets of published exponents that are tried, of the longest known orchestrators: each costs
planning time."""
PUBLISHED_FRESH_S = 60.0
"""Seconds after which the default strategy fetches published weights anew."""
MIN_PROMPT_TOKENS = 256
"""Shorter prompts do not count in the choice of a chain."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanningView:
    """Input of planning."""

    snapshot: Snapshot
    """With links."""
    request: RouteRequest
    rtt_ms: Mapping[PeerId, float]
    """The client's round trips."""
    blames: Mapping[PeerId, float] = field(default_factory=dict)
    """Weighed reports."""
    stability: Mapping[PeerId, float] = field(default_factory=dict)
    """Topological stability, where the strategy reads it."""
    codecs: tuple[CodecLinkCost, ...] = ()
    """Costs of the codecs that links choose from, the plainest first; empty without compression."""
    prompt_tokens: int = 0
    """Tokens of a prompt that the planned chain computes first."""

    def holds(self, hops: Hops) -> bool:
        """Whether the nodes of `hops` are in the snapshot, with those blocks."""
        spans = {node.peer_id: node.span for node in self.snapshot.nodes}
        return all(hop.peer_id in spans and spans[hop.peer_id].covers(hop.span) for hop in hops)


@dataclass(frozen=True, slots=True, eq=False)
class ChainPlan:
    hops: Hops
    request: ChainRequest


def describe_decision(
    snapshot: Snapshot, plan: ChainPlan, strategy: Strategy, reason: str
) -> dict[str, Any]:
    """Describe as JSON, for `nesa-node explain`, the terms of the chain's cost, and the cost
    without each of its nodes.

    An infinite cost becomes None. The hops cover the request's span. Takes one planning run for
    each hop.
    """
    request, used = plan.request, frozenset(hop.peer_id for hop in plan.hops)
    problem = make_problem(
        snapshot, replace(request, exclude=request.exclude - used, min_free_tokens=0)
    )
    explanation = explain(problem, hops_to_visits(problem, request.span, plan.hops), strategy)
    return {
        "reason": reason,
        "model": snapshot.model_id,
        "strategy": explanation.strategy,
        "nodes": problem.num_nodes,
        "excluded": len(request.exclude),
        "prompt_tokens": request.prompt_tokens,
        "chain": _describe_visits(problem, explanation.chain, request.span),
        "terms": dict(explanation.terms),
        "cost": explanation.cost,
        "step_s": dict(explanation.step_s),
        "alternatives": [
            _describe_alternative(problem, alternative, request.span)
            for alternative in explanation.alternatives
        ],
    }


def _describe_visits(problem: ChainProblem, chain: Chain, span: Span) -> list[dict[str, Any]]:
    """Visits of a chain with their seconds: transfer to the node, and computation there."""
    ways_s = [problem.entry_s_N[visit.node] for visit in chain[:1]] + [
        problem.transfer_s_NN[before.node, visit.node] for before, visit in pairwise(chain)
    ]
    return [
        {
            "peer": problem.peers[visit.node],
            "blocks": [span.start + visit.start, span.start + visit.end],
            "way_s": float(way_s),
            "visit_s": float(problem.visit_s_N[visit.node]),
            "compute_s": float(problem.busy_block_s_N[visit.node] * (visit.end - visit.start)),
            "load": float(problem.load_N[visit.node]),
        }
        for visit, way_s in zip(chain, ways_s, strict=True)
    ]


def _describe_alternative(
    problem: ChainProblem, alternative: Alternative, span: Span
) -> dict[str, Any]:
    found = alternative.chain is not None and math.isfinite(alternative.cost)
    return {
        "without": alternative.excluded_peer,
        "cost": alternative.cost if found else None,
        "step_s": alternative.step_s if found else None,
        "chain": _describe_visits(problem, alternative.chain, span) if alternative.chain else None,
    }


class ChainPlanner:
    """Plans chains for all sessions of a client. `clock` returns monotonic seconds."""

    def __init__(
        self,
        swarm: Swarm,
        strategy: str = DEFAULT_STRATEGY,
        *,
        decisions: DecisionLog | None = None,
        measure_speed: MeasureSpeed | None = None,
        barred: Collection[PeerId] = (),
        distrust_s: Callable[[PeerId], float] | None = None,
        require_attested: RequireAttested | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`barred` nodes, which may change, are never used; other nodes cost `distrust_s(peer)`
        more per token. `require_attested` raises `RefusedError` for nodes that are not to be used,
        after asking them. Without `measure_speed`, records are believed. Raises `ConfigError` for
        an unknown strategy.
        """
        self.barred = barred
        self.distrust_s = distrust_s
        self.require_attested = require_attested
        self._swarm = swarm
        self._clock = clock
        self._next_speed_at: dict[PeerId, float] = {}
        self._measure_speed = measure_speed
        self.strategy = make_session_strategy(strategy, np.random.default_rng())
        self._decisions = decisions
        self._background = TaskSet()
        self._next_published_at = -math.inf
        self.avoidance = FailurePenalties(clock)
        self.claims = SpeedClaims(clock)
        self.refusals = RefusalTracker(clock)
        self.snapshots = SnapshotCache(swarm.directory)
        self.latencies = LatencyView(swarm)

    async def build_view(
        self, snapshot: Snapshot, request: RouteRequest, *, may_ping: bool
    ) -> PlanningView:
        """Planning view of `snapshot`, with announced speeds corrected by measurements.

        With `may_ping`, candidates are pinged first unless there is only one. In a star all traffic
        passes the client: the round trip between nodes is the sum of their round trips to it.
        """
        if request.allowed_peers is not None and len(request.allowed_peers) == 1:
            # A single candidate needs no links.
            return PlanningView(snapshot, request, {})
        if may_ping and isinstance(self.strategy, GreedyStrategy):
            await self._use_published(request.model_id)
        elif may_ping and isinstance(self.strategy, LatencyStrategy):
            self._refresh_published(request.model_id)
        stable = reads_stability(self.strategy)
        linked, rtt_ms = await self.latencies.add_links(
            snapshot, request.span, may_ping=may_ping, with_stability=stable
        )
        nodes = tuple(self.claims.clamp(node) for node in linked.nodes)
        if not request.is_chain:
            linked = replace(
                linked, links=_links_through_client(rtt_ms, [n.peer_id for n in nodes])
            )
        blames = self._swarm.directory.blames(request.model_id)
        stability = self.latencies.stability if stable else {}
        codecs = await asyncio.to_thread(_codec_costs, request) if request.compresses else ()
        return PlanningView(
            replace(linked, nodes=nodes), request, rtt_ms, blames, stability, codecs
        )

    def _refresh_published(self, model_id: ModelId) -> None:
        """Fetch published weights in the background, at most every `PUBLISHED_FRESH_S`.

        No session waits for them: a client's first chain is by the shipped weights.
        """
        now = self._clock()
        if now >= self._next_published_at:
            self._next_published_at = now + PUBLISHED_FRESH_S
            self._background.start(self._use_published(model_id), name="published weights")

    async def _use_published(self, model_id: ModelId) -> None:
        """Give the strategy what orchestrators publish for it, within the bounds of a search."""
        try:
            placements = await self._swarm.notices.fetch(PlacementNotice, model_id)
        except NesaError as error:
            log.debug("published_weights_not_fetched", reason=str(error))
            return
        known_s = self._swarm.notices.peer_ages.known_s
        placements = sorted(placements, key=lambda each: known_s(each.signer), reverse=True)
        found = [
            tuning
            for each in placements
            if each.exponents is not None
            and (tuning := parse_published(each.exponents.values)) is not None
        ]
        self.strategy = _with_published(self.strategy, found)

    def plan_chain(
        self, view: PlanningView, keep: Hops, *, exclude: frozenset[PeerId], min_free_tokens: int
    ) -> ChainPlan:
        """Plan hops that include `keep`. Raises `MissingBlocksError`.

        The view's prompt counts in a whole chain, if it is as long as `MIN_PROMPT_TOKENS`.
        """
        asked = replace(self.chain_request(view), exclude=exclude, min_free_tokens=min_free_tokens)
        if not keep and view.prompt_tokens >= MIN_PROMPT_TOKENS:
            # A session may end long before its last token.
            steps = min(view.request.output_tokens, TOKENS_PER_SESSION)
            asked = replace(asked, prompt_tokens=view.prompt_tokens, output_tokens=steps)
        hops = fill_gaps(view.snapshot, asked, keep, choose=self.strategy.choose)
        return ChainPlan(hops, asked)

    async def remeasure_nodes(self, snapshot: Snapshot, request: RouteRequest, hops: Hops) -> None:
        """Ping the nodes of `hops`, and measure their speed if that is due.

        Nodes that announce far more than the measured speed are reported.
        """
        used = {hop.peer_id for hop in hops}
        nodes = [node for node in snapshot.nodes if node.peer_id in used]
        await self.latencies.ping_nodes(nodes)
        for node in nodes:
            peer = node.peer_id
            if self._measure_speed is None or self._clock() < self._next_speed_at.get(peer, 0.0):
                continue
            self._next_speed_at[peer] = self._clock() + SPEED_INTERVAL_S
            tokens_per_s = await self._measure_speed(node, request)
            if tokens_per_s is None:
                self.claims.record_unmeasurable(node)
                self._next_speed_at[peer] = self._clock() + FAILED_MEASUREMENT_INTERVAL_S
                continue
            # Scaled to the idle node: planning accounts for its load separately.
            idle_tokens_per_s = tokens_per_s * (1 + node.load)
            log.info("speed_measured", peer=peer, tokens_per_s=idle_tokens_per_s)
            self.claims.record_measurement(peer, idle_tokens_per_s)
            if node.decode_tokens_per_s > REPORTABLE_RATIO * idle_tokens_per_s:
                self._swarm.failure_reporter.record_failure(request.model_id, peer, "slow")

    def expected_step_s(self, view: PlanningView, hops: Hops) -> float | None:
        """Expected seconds of a step through `hops`; None if the view lacks one of their nodes."""
        if not view.holds(hops):
            return None
        return chain_cost_s(view.snapshot, self.chain_request(view), hops)

    def without_own_load(self, view: PlanningView, hops: Hops, step_s: float) -> PlanningView:
        """`view` with the load subtracted that a session over `hops` itself causes.

        Its steps take `step_s`. Otherwise any idle node would look better than a node the session
        keeps busy.
        """
        lengths = {hop.peer_id: len(hop.span) for hop in hops}

        def relieved(node: NodeState) -> NodeState:
            length = lengths.get(node.peer_id)
            if length is None or node.decode_tokens_per_s <= 0:
                return node
            compute_s = view.request.rows * length / (node.decode_tokens_per_s * len(node.span))
            return replace(node, load=max(node.load - compute_s / step_s, 0.0))

        nodes = tuple(relieved(node) for node in view.snapshot.nodes)
        return replace(view, snapshot=replace(view.snapshot, nodes=nodes))

    def record_decision(
        self, session: bytes, reason: str, view: PlanningView, plan: ChainPlan
    ) -> None:
        """Record in the background why `session` got the plan's hops."""
        if self._decisions is not None and view.holds(plan.hops):
            writing = asyncio.to_thread(
                self._write_decision, self._decisions, session, reason, view.snapshot, plan
            )
            self._background.start(writing, name="decision")

    def _write_decision(
        self,
        decisions: DecisionLog,
        session: bytes,
        reason: str,
        snapshot: Snapshot,
        plan: ChainPlan,
    ) -> None:
        body = describe_decision(snapshot, plan, self.strategy, reason)
        try:
            decisions.add(LoggedDecision("session", session.hex(), time.time(), body))
        except OSError as error:
            log.warning("decision_not_logged", reason=str(error))

    async def close(self) -> None:
        """Cancel pending writes and fetches."""
        await self.snapshots.close()
        await self._background.close()

    def chain_request(self, view: PlanningView) -> ChainRequest:
        """Request for one decoded token, with penalties for failures seen here and for reports.

        Messages take as long as in the codec that each link would choose.
        """
        request, peers = view.request, [node.peer_id for node in view.snapshot.nodes]
        penalties_s = {
            peer: self.avoidance.penalty_s(peer) + blame_penalty_s(view.blames.get(peer, 0.0))
            for peer in peers
        }
        if self.distrust_s is not None:
            for peer in peers:
                penalties_s[peer] += self.distrust_s(peer)
        return ChainRequest(
            span=request.span,
            bytes_per_token=request.hidden_size * tensors.DTYPES[request.dtype].itemsize,
            message_s=partial(fastest_seconds, view.codecs) if view.codecs else None,
            entry_rtt_ms=view.rtt_ms,
            penalties_s={peer: seconds for peer, seconds in penalties_s.items() if seconds > 0},
            stability=view.stability,
        )


def _codec_costs(request: RouteRequest) -> tuple[CodecLinkCost, ...]:
    """Costs of the session's codecs here, if all nodes decode what this client does.

    Blocks for milliseconds at the first call.
    """
    dtype = tensors.DTYPES[request.dtype]
    names = candidate_codecs(request.options.quality, codec_names())
    costs = (link_cost(name, request.hidden_size, dtype) for name in names)
    # What would grow is sent as it is.
    found = tuple(replace(each, ratio=min(each.ratio, 1.0)) for each in costs)
    return () if names == (UNCOMPRESSED,) else found


def _with_published(strategy: Strategy, found: Sequence[Tuning]) -> Strategy:
    """`strategy` with what `found` has for it, of the longest known signer first."""
    match strategy:
        case GreedyStrategy():
            rules = dict.fromkeys(each.rule for each in found)
            return replace(strategy, published=tuple(rules)[:MAX_PUBLISHED_EXPONENTS])
        case LatencyStrategy(weights=shipped):
            weights = found[0].weights if found else shipped
            return replace(strategy, published=None if weights == shipped else weights)
    return strategy


def _links_through_client(rtt_ms: Mapping[PeerId, float], peers: Sequence[PeerId]) -> Links:
    links = Links.unknown(peers)
    rtt_ms_N = np.array([rtt_ms[peer] for peer in peers])
    rtt_ms_NN = rtt_ms_N[:, None] + rtt_ms_N[None, :]
    np.fill_diagonal(rtt_ms_NN, 0.0)
    return replace(links, rtt_ms_NN=rtt_ms_NN)
