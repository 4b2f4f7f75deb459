"""Placement planner: the best placement found for a snapshot, with a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.chains import Hop
from nesa_node.routing.placement.bound import least_latency_s
from nesa_node.routing.placement.capacity import make_room
from nesa_node.routing.placement.exhaustive import (
    MAX_BLOCKS,
    MAX_LAYOUTS,
    best_of_all,
    count_layouts,
)
from nesa_node.routing.placement.flow import most_flow
from nesa_node.routing.placement.improve import mend, widen
from nesa_node.routing.placement.recipes import RECIPES, Pipelines, Recipe, lay_out
from nesa_node.routing.placement.room import Lacks, Layout, Room
from nesa_node.routing.placement.score import (
    MANY_NODES,
    Goal,
    Score,
    best_chain,
    latency_s,
    measure,
)
from nesa_node.routing.problem import Chain
from nesa_node.topology.snapshot import Snapshot

_FOR_MANY: Mapping[Goal, frozenset[str]] = MappingProxyType(
    {
        "latency": frozenset({"two-pipelines", "pipeline-regions"}),
        "throughput": frozenset({"fill", "regions"}),
    }
)
"""The recipes tried with more than `MANY_NODES` nodes, where each takes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
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
    lacks: Lacks
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


def place(
    snapshot: Snapshot,
    requests: Request | Sequence[Request],
    *,
    goal: Goal = "latency",
    replicas: int = 2,
    recipes: Sequence[Recipe] = RECIPES,
) -> Placement:
    """The best placement found for all nodes of `snapshot`, regardless of their present spans.

    Each request is one client; their mean latency counts. Every block gets `replicas` holders if
    possible: holes are worse than missing replicas, and these are worse than any cost. Few nodes
    are searched exhaustively; else the best of `recipes` is improved by single moves.
    """
    room = make_room(snapshot, requests, replicas=replicas)
    layout, score, method = best_layout(room, goal, recipes)
    return describe(snapshot, room, goal, layout, score, method)


def best_layout(
    room: Room, goal: Goal, recipes: Sequence[Recipe] = RECIPES
) -> tuple[Layout, Score, str]:
    """The assignment that `place` describes, its score, and the method that found it."""
    if room.problem.num_blocks <= MAX_BLOCKS and count_layouts(room) <= MAX_LAYOUTS:
        layout = best_of_all(room, goal)
        return layout, measure(room, layout), "exhaustive"
    if room.problem.num_nodes > MANY_NODES:
        recipes = [each for each in recipes if each.name in _FOR_MANY[goal]] or recipes[:1]
    best: tuple[Layout, Score, str] | None = None
    pipelines = Pipelines(room)
    for recipe in recipes:
        layout = finish(room, lay_out(room, recipe, pipelines), goal)
        score = measure(room, layout)
        if best is None or score.better(best[1], goal):
            best = (layout, score, recipe.name)
    if best is None:
        raise ValueError("no recipe to place nodes by")
    return best


def finish(room: Room, layout: Layout, goal: Goal) -> Layout:
    """Improve `layout` by local search: missing replicas first, then the bottleneck."""
    if layout.lacks(room).replicas:
        chain = best_chain(room.problem_of(layout)) if goal == "latency" else None
        users = frozenset(visit.node for visit in chain or ())
        layout = mend(room, mend(room, layout, keep=users))
    return widen(room, layout) if goal == "throughput" else layout


def describe(
    snapshot: Snapshot, room: Room, goal: Goal, layout: Layout, score: Score, method: str
) -> Placement:
    """`layout` by peer ids, with its bound."""
    if goal == "latency":
        bound = float(np.mean([_least_s(room, layout, at) for at in range(len(room.clients))]))
    else:
        bound = most_flow(room.most_N, room.blocks_per_s_N, room.problem.num_blocks)
    spans = {
        peer: layout.span(node)
        for node, peer in enumerate(room.problem.peers)
        if layout.ends_N[node] > layout.starts_N[node]
    }
    return Placement(
        model_id=snapshot.model_id,
        num_blocks=snapshot.num_blocks,
        goal=goal,
        replicas=room.replicas,
        spans=MappingProxyType(spans),
        chain=hops(room, best_chain(room.problem_of(layout)) or ()),
        latency_s=score.latency_s,
        steps_per_s=score.steps_per_s,
        lacks=score.lacks,
        bound=bound,
        method=method,
    )


def _least_s(room: Room, layout: Layout, client: int) -> float:
    return least_latency_s(room.seen_by(client), latency_s(room.problem_of(layout, client)))


def hops(room: Room, chain: Chain) -> tuple[Hop, ...]:
    return tuple(
        Hop(room.problem.peers[visit.node], Span(visit.start, visit.end)) for visit in chain
    )
