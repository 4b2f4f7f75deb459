"""Placement planner: the best placement found for a snapshot, with a bound; what-if analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import ChainRequest, step_time
from nesa_node.routing.chains import ChainChooser, Hop, visits_to_hops
from nesa_node.routing.placement.assignment_search import (
    MAX_ASSIGNMENTS,
    MAX_BLOCKS,
    balance_throughput,
    count_assignments,
    find_best_assignment,
    repair_coverage,
)
from nesa_node.routing.placement.moves import MoveCosts, RebalancePlan
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    CoverageDeficit,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.rebalance import RebalancePolicy, rebalance
from nesa_node.routing.placement.recipes import (
    RECIPES,
    BlockCoverage,
    Pipelines,
    Recipe,
    apply_recipe,
    water_fill,
)
from nesa_node.routing.placement.score import (
    LARGE_SWARM_NODES,
    Goal,
    PlacementScore,
    best_chain,
    best_chain_latency_s,
    flow_bound,
    latency_bound_s,
    score_assignment,
)
from nesa_node.routing.placement.spread import spread_holders
from nesa_node.routing.search.exact import exact_latency
from nesa_node.topology.snapshot import NodeState, Snapshot

_LARGE_SWARM_RECIPES: Mapping[Goal, frozenset[str]] = MappingProxyType(
    {
        "latency": frozenset({"two-pipelines", "pipeline-regions"}),
        "throughput": frozenset({"fill", "regions"}),
    }
)
"""The recipes tried with more than `LARGE_SWARM_NODES` nodes, where each takes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """A span for every node that can hold one, and the expected performance.

    `chain`: the best chain for the first request, empty if some block has no holder. `latency_s`:
    time of a step, the mean over all requests (inf without chains). `steps_per_s`: throughput of
    all nodes together. `exposed`: as in `PlacementScore`. `bound`: no placement has a smaller
    `latency_s`, or a greater `steps_per_s` if that was the goal. `method`: "exhaustive", or the
    name of a recipe.
    """

    model_id: ModelId
    num_blocks: int
    goal: Goal
    replicas: int
    spans: Mapping[PeerId, Span]
    chain: tuple[Hop, ...]
    latency_s: float
    steps_per_s: float
    deficit: CoverageDeficit
    exposed: int
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """Relative distance to the bound: 0 is optimal, inf if there is no chain or throughput.

        It includes the cost of replicas, which the bound ignores.
        """
        if self.bound in (self.latency_s, self.steps_per_s):
            return 0.0
        if self.goal == "latency":
            return self.latency_s / self.bound - 1.0 if self.bound > 0 else np.inf
        return self.bound / self.steps_per_s - 1.0 if self.steps_per_s > 0 else np.inf


def plan_placement(
    snapshot: Snapshot,
    requests: ChainRequest | Sequence[ChainRequest],
    *,
    goal: Goal = "latency",
    replicas: int = 2,
    recipes: Sequence[Recipe] = RECIPES,
) -> PlacementPlan:
    """The best placement found for all nodes of `snapshot`, regardless of their present spans.

    Each request is one client; their mean latency counts. Every block gets `replicas` holders if
    possible: holes are worse than missing replicas, and these are worse than any cost. Few nodes
    are searched exhaustively; else the best of `recipes` is improved by single moves. Then holders
    are spread over failure domains (`spread_holders`).
    """
    instance = make_placement_problem(snapshot, requests, replicas=replicas)
    assignment, score, method = find_assignment(instance, goal, recipes)
    return describe_plan(snapshot, instance, goal, assignment, score, method)


def find_assignment(
    instance: PlacementProblem, goal: Goal, recipes: Sequence[Recipe] = RECIPES
) -> tuple[Assignment, PlacementScore, str]:
    """The assignment that `plan_placement` describes, its score, and the method that found it."""
    assignment, method = _search_assignment(instance, goal, recipes)
    assignment = spread_holders(instance, assignment, goal)
    return assignment, score_assignment(instance, assignment), method


def _search_assignment(
    instance: PlacementProblem, goal: Goal, recipes: Sequence[Recipe]
) -> tuple[Assignment, str]:
    """The assignment of least cost, and the method that found it."""
    if instance.problem.num_blocks <= MAX_BLOCKS and count_assignments(instance) <= MAX_ASSIGNMENTS:
        return find_best_assignment(instance, goal), "exhaustive"
    if instance.problem.num_nodes > LARGE_SWARM_NODES:
        recipes = [each for each in recipes if each.name in _LARGE_SWARM_RECIPES[goal]] or recipes[
            :1
        ]
    best: tuple[Assignment, PlacementScore, str] | None = None
    pipelines = Pipelines(instance)
    for recipe in recipes:
        assignment = improve_assignment(instance, apply_recipe(instance, recipe, pipelines), goal)
        score = score_assignment(instance, assignment)
        if best is None or score.is_better_than(best[1], goal):
            best = (assignment, score, recipe.name)
    if best is None:
        raise ValueError("no recipe to place nodes by")
    return best[0], best[2]


def improve_assignment(
    instance: PlacementProblem, assignment: Assignment, goal: Goal
) -> Assignment:
    """Improve `assignment` by local search: missing replicas first, then the bottleneck."""
    if assignment.deficit(instance).replicas:
        chain = best_chain(instance.chain_problem(assignment)) if goal == "latency" else None
        users = frozenset(visit.node for visit in chain or ())
        assignment = repair_coverage(
            instance, repair_coverage(instance, assignment, pinned_nodes=users)
        )
    return balance_throughput(instance, assignment) if goal == "throughput" else assignment


def describe_plan(
    snapshot: Snapshot,
    instance: PlacementProblem,
    goal: Goal,
    assignment: Assignment,
    score: PlacementScore,
    method: str,
) -> PlacementPlan:
    """`assignment` by peer ids, with its bound."""
    if goal == "latency":
        clients = range(len(instance.client_problems))
        bound = float(np.mean([_client_bound_s(instance, assignment, at) for at in clients]))
    else:
        bound = flow_bound(
            instance.max_blocks_N, instance.blocks_per_s_N, instance.problem.num_blocks
        )
    spans = {
        peer: assignment.span(node)
        for node, peer in enumerate(instance.problem.peers)
        if assignment.ends_N[node] > assignment.starts_N[node]
    }
    return PlacementPlan(
        model_id=snapshot.model_id,
        num_blocks=snapshot.num_blocks,
        goal=goal,
        replicas=instance.replicas,
        spans=MappingProxyType(spans),
        chain=visits_to_hops(
            instance.problem, best_chain(instance.chain_problem(assignment)) or ()
        ),
        latency_s=score.latency_s,
        steps_per_s=score.steps_per_s,
        deficit=score.deficit,
        exposed=score.exposed,
        bound=bound,
        method=method,
    )


def _client_bound_s(instance: PlacementProblem, assignment: Assignment, client: int) -> float:
    return latency_bound_s(
        instance.for_client(client),
        best_chain_latency_s(instance.chain_problem(assignment, client)),
    )


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
    exposed: int

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
        chain=visits_to_hops(instance.problem, chains[0] or ()),
        deficit=score.deficit,
        exposed=score.exposed,
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

    def moved(nodes: Sequence[NodeState]) -> tuple[NodeState, ...]:
        return tuple(node.with_span(spans.get(node.peer_id, node.span)) for node in nodes)

    return replace(snapshot, nodes=moved(snapshot.nodes), joining=moved(snapshot.joining))
