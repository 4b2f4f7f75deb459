"""What-if analysis: the effect of joins and losses on a swarm, with the live planners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import ChainChooser, Hop
from nesa_node.routing.placement.moves import MoveCosts, RebalancePlan
from nesa_node.routing.placement.placement_problem import (
    CoverageDeficit,
    make_placement_problem,
)
from nesa_node.routing.placement.plan import (
    PlacementPlan,
    find_assignment,
    plan_placement,
    visits_to_hops,
)
from nesa_node.routing.placement.rebalance import RebalancePolicy, rebalance
from nesa_node.routing.placement.recipes import BlockCoverage, water_fill
from nesa_node.routing.placement.score import Goal, best_chain, score_assignment
from nesa_node.routing.problem import step_time
from nesa_node.routing.search.exact import exact_latency
from nesa_node.topology.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfSettings:
    """Settings of an analysis: requests (one per client), goal, strategy and costs of moves."""

    requests: Sequence[ChainRequest]
    goal: Goal = "latency"
    replicas: int = 2
    strategy: ChainChooser = exact_latency
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
    placement = plan_placement(
        changed, question.requests, goal=question.goal, replicas=question.replicas
    )
    return WhatIfResult(
        before=measure_swarm(snapshot, question),
        changed=measure_swarm(changed, question),
        settled=measure_swarm(after, question),
        best=measure_swarm(with_spans(changed, placement.spans), question),
        moves=moves,
        placement=placement,
    )


def measure_swarm(snapshot: Snapshot, question: WhatIfSettings) -> SwarmPerformance:
    instance = make_placement_problem(snapshot, question.requests, replicas=question.replicas)
    score = score_assignment(instance, instance.current_assignment())
    chains = [best_chain(problem, choose=question.strategy) for problem in instance.client_problems]
    latencies_s = [
        np.inf if chain is None else step_time(problem, chain).total_s
        for problem, chain in zip(instance.client_problems, chains, strict=True)
    ]
    return SwarmPerformance(
        snapshot=snapshot,
        latency_s=float(np.mean(latencies_s)),
        steps_per_s=score.steps_per_s,
        chain=visits_to_hops(instance, chains[0] or ()),
        deficit=score.deficit,
    )


def assign_empty_nodes(snapshot: Snapshot, question: WhatIfSettings) -> Snapshot:
    """Assign spans to nodes without one, as joining nodes would; plan all if no node has one."""
    instance = make_placement_problem(snapshot, question.requests, replicas=question.replicas)
    problem = instance.problem
    empty_N = problem.ends_N <= problem.starts_N
    if not empty_N.any():
        return snapshot
    if empty_N.all():
        assignment, _, _ = find_assignment(instance, question.goal)
        spans = {peer: assignment.span(node) for node, peer in enumerate(problem.peers)}
        return with_spans(snapshot, spans)
    coverage = BlockCoverage.empty(problem.num_blocks)
    rate_N = instance.blocks_per_s_N
    for node in np.flatnonzero(~empty_N).tolist():
        start, end = int(problem.starts_N[node]), int(problem.ends_N[node])
        coverage.add_span(start, end - start, float(rate_N[node]))
    starts_N = problem.starts_N.copy()
    newcomers = sorted(
        np.flatnonzero(empty_N).tolist(), key=lambda node: -int(instance.max_blocks_N[node])
    )
    water_fill(instance, starts_N, coverage, newcomers)
    spans = {
        problem.peers[node]: Span(
            int(starts_N[node]), int(starts_N[node] + instance.max_blocks_N[node])
        )
        for node in newcomers
    }
    return with_spans(snapshot, spans)


def with_spans(snapshot: Snapshot, spans: Mapping[PeerId, Span]) -> Snapshot:
    """`snapshot` with the given spans, at the same speed per block."""
    return replace(
        snapshot,
        nodes=tuple(node.with_span(spans.get(node.peer_id, node.span)) for node in snapshot.nodes),
        joining=tuple(
            node.with_span(spans.get(node.peer_id, node.span)) for node in snapshot.joining
        ),
    )
