"""What-if analysis: the effect of joins and losses on a swarm, with the live planners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import Hop
from nesa_node.routing.placement.moves import MoveCosts, RebalancePlan
from nesa_node.routing.placement.placement_problem import (
    CoverageDeficit,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.plan import (
    PlacementPlan,
    describe_plan,
    find_assignment,
    visits_to_hops,
)
from nesa_node.routing.placement.rebalance import RebalancePolicy, rebalance
from nesa_node.routing.placement.recipes import BlockCoverage, water_fill
from nesa_node.routing.placement.score import Goal, score_assignment
from nesa_node.routing.problem import Chain, ChainProblem, step_time
from nesa_node.routing.search.exact import exact_latency
from nesa_node.topology.snapshot import NodeState, Snapshot

ChainStrategy = Callable[[ChainProblem], Chain]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfSettings:
    """Settings of an analysis: requests (one per client), goal, strategy and costs of moves."""

    requests: Sequence[ChainRequest]
    goal: Goal = "latency"
    replicas: int = 2
    strategy: ChainStrategy = exact_latency
    policy: RebalancePolicy = field(default_factory=RebalancePolicy)
    costs: MoveCosts = field(default_factory=MoveCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPerformance:
    """A swarm and its performance; `latency_s` is the mean over clients, `chain` the first's."""

    snapshot: Snapshot
    latency_s: float
    steps_per_s: float
    chain: tuple[Hop, ...]
    deficit: CoverageDeficit

    @property
    def coverage(self) -> tuple[int, ...]:
        return self.snapshot.coverage()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfResult:
    """The swarm before the change, after it, after the moves that follow, and optimally placed."""

    before: SwarmPerformance
    changed: SwarmPerformance
    settled: SwarmPerformance
    best: SwarmPerformance
    moves: RebalancePlan
    placement: PlacementPlan


def study_change(snapshot: Snapshot, changed: Snapshot, question: WhatIfSettings) -> WhatIfResult:
    """Compare `snapshot` with `changed`; every node has a span already (see
    `assign_empty_nodes`)."""
    moves = rebalance(
        changed,
        question.requests,
        goal=question.goal,
        replicas=question.replicas,
        policy=question.policy,
        costs=question.costs,
    )
    after = with_spans(changed, {move.peer_id: move.after for move in moves.moves})
    room = make_placement_problem(changed, question.requests, replicas=question.replicas)
    layout, score, method = find_assignment(room, question.goal)
    placement = describe_plan(changed, room, question.goal, layout, score, method)
    return WhatIfResult(
        before=measure_swarm(snapshot, question),
        changed=measure_swarm(changed, question),
        settled=measure_swarm(after, question),
        best=measure_swarm(with_spans(changed, placement.spans), question),
        moves=moves,
        placement=placement,
    )


def measure_swarm(snapshot: Snapshot, question: WhatIfSettings) -> SwarmPerformance:
    room = make_placement_problem(snapshot, question.requests, replicas=question.replicas)
    score = score_assignment(room, room.current_assignment())
    chains = [
        _choose_chain(room, question.strategy, client)
        for client in range(len(room.client_problems))
    ]
    latencies_s = [
        np.inf if chain is None else step_time(room.client_problems[client], chain).total_s
        for client, chain in enumerate(chains)
    ]
    return SwarmPerformance(
        snapshot=snapshot,
        latency_s=float(np.mean(latencies_s)),
        steps_per_s=score.steps_per_s,
        chain=visits_to_hops(room, chains[0] or ()),
        deficit=score.deficit,
    )


def _choose_chain(instance: PlacementProblem, strategy: ChainStrategy, client: int) -> Chain | None:
    try:
        return strategy(instance.client_problems[client])
    except MissingBlocksError:
        return None


def assign_empty_nodes(snapshot: Snapshot, question: WhatIfSettings) -> Snapshot:
    """Assign spans to nodes without one, as joining nodes would; plan all if no node has one."""
    room = make_placement_problem(snapshot, question.requests, replicas=question.replicas)
    problem = room.problem
    empty_N = problem.ends_N <= problem.starts_N
    if not empty_N.any():
        return snapshot
    if empty_N.all():
        layout, _, _ = find_assignment(room, question.goal)
        spans = {peer: layout.span(node) for node, peer in enumerate(problem.peers)}
        return with_spans(snapshot, spans)
    water = BlockCoverage.empty(problem.num_blocks)
    rate_N = room.blocks_per_s_N
    for node in np.flatnonzero(~empty_N).tolist():
        start, end = int(problem.starts_N[node]), int(problem.ends_N[node])
        water.add_span(start, end - start, float(rate_N[node]))
    starts_N = problem.starts_N.copy()
    newcomers = sorted(
        np.flatnonzero(empty_N).tolist(), key=lambda node: -int(room.max_blocks_N[node])
    )
    water_fill(room, starts_N, water, newcomers)
    spans = {
        problem.peers[node]: Span(
            int(starts_N[node]), int(starts_N[node] + room.max_blocks_N[node])
        )
        for node in newcomers
    }
    return with_spans(snapshot, spans)


def with_spans(snapshot: Snapshot, spans: Mapping[PeerId, Span]) -> Snapshot:
    """`snapshot` with the given spans, at the same speed per block."""
    return replace(
        snapshot,
        nodes=tuple(_with_span(node, spans.get(node.peer_id)) for node in snapshot.nodes),
        joining=tuple(_with_span(node, spans.get(node.peer_id)) for node in snapshot.joining),
    )


def _with_span(node: NodeState, span: Span | None) -> NodeState:
    if span is None or span == node.span:
        return node
    share = max(len(node.span), 1) / max(len(span), 1)
    return replace(
        node,
        span=span,
        prefill_tokens_per_s=node.prefill_tokens_per_s * share,
        decode_tokens_per_s=node.decode_tokens_per_s * share,
    )
