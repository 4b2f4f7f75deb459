"""Placement planner: the best placement found for a snapshot, with a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import Hop
from nesa_node.routing.placement.assignment_search import (
    MAX_ASSIGNMENTS,
    MAX_BLOCKS,
    balance_throughput,
    count_assignments,
    find_best_assignment,
    repair_coverage,
)
from nesa_node.routing.placement.bound import latency_bound_s
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    CoverageDeficit,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.recipes import RECIPES, Pipelines, Recipe, apply_recipe
from nesa_node.routing.placement.score import (
    LARGE_SWARM_NODES,
    Goal,
    PlacementScore,
    best_chain,
    best_chain_latency_s,
    flow_bound,
    score_assignment,
)
from nesa_node.routing.problem import Chain
from nesa_node.topology.snapshot import Snapshot

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
    all nodes together. `bound`: no placement has a smaller `latency_s`, or a greater `steps_per_s`
    if that was the goal. `method`: "exhaustive", or the name of a recipe.
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
    are searched exhaustively; else the best of `recipes` is improved by single moves.
    """
    instance = make_placement_problem(snapshot, requests, replicas=replicas)
    assignment, score, method = find_assignment(instance, goal, recipes)
    return describe_plan(snapshot, instance, goal, assignment, score, method)


def find_assignment(
    instance: PlacementProblem, goal: Goal, recipes: Sequence[Recipe] = RECIPES
) -> tuple[Assignment, PlacementScore, str]:
    """The assignment that `plan_placement` describes, its score, and the method that found it."""
    if instance.problem.num_blocks <= MAX_BLOCKS and count_assignments(instance) <= MAX_ASSIGNMENTS:
        assignment = find_best_assignment(instance, goal)
        return assignment, score_assignment(instance, assignment), "exhaustive"
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
    return best


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
        bound = float(
            np.mean(
                [
                    _client_bound_s(instance, assignment, at)
                    for at in range(len(instance.client_problems))
                ]
            )
        )
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
        chain=visits_to_hops(instance, best_chain(instance.chain_problem(assignment)) or ()),
        latency_s=score.latency_s,
        steps_per_s=score.steps_per_s,
        deficit=score.deficit,
        bound=bound,
        method=method,
    )


def _client_bound_s(instance: PlacementProblem, assignment: Assignment, client: int) -> float:
    return latency_bound_s(
        instance.for_client(client),
        best_chain_latency_s(instance.chain_problem(assignment, client)),
    )


def visits_to_hops(instance: PlacementProblem, chain: Chain) -> tuple[Hop, ...]:
    return tuple(
        Hop(instance.problem.peers[visit.node], Span(visit.start, visit.end)) for visit in chain
    )
