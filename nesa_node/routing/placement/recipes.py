"""Recipes: constructive heuristics for placements, tried by planners and used as schemas.

Each is cheap compared with a search, and none is best everywhere. Pipelines suit few sessions with
low latency, filling suits many sessions. A region that holds the whole model saves its clients
long-distance transfers; a smaller one can be part of a pipeline through several regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.routing.chain_request import Chain
from nesa_node.routing.placement.pipeline import (
    cut_pipeline,
    even_cuts,
    find_pipeline,
    heuristic_pipeline,
)
from nesa_node.routing.placement.placement_problem import Assignment, PlacementProblem, window_sums
from nesa_node.routing.search.minplus import nearest_transfer_s

_EMPTY_LEVEL = 1e-9
_SHARPNESS = 3.0


@dataclass(slots=True, eq=False)
class BlockCoverage:
    """Holders and speed per block of the spans placed so far.

    A node adds its speed divided by the length of its span to each of its blocks.
    """

    holders_B: Ints
    speed_B: Floats

    @classmethod
    def empty(cls, num_blocks: int) -> BlockCoverage:
        return cls(np.zeros(num_blocks, dtype=np.int64), np.zeros(num_blocks))

    def add_span(self, start: int, max_blocks: int, blocks_per_s: float) -> None:
        self.holders_B[start : start + max_blocks] += 1
        self.speed_B[start : start + max_blocks] += blocks_per_s / max_blocks

    def best_start(
        self, max_blocks: int, blocks_per_s: float, replicas: int, first_start: int, last_start: int
    ) -> int:
        """The best start from `first_start` to `last_start` for a span of `max_blocks` blocks.

        It covers most blocks without a holder, then adds most missing replicas, then most relieves
        slow blocks; ties go to the lowest start. The relief of a block is the decrease of its
        speed^-3: this nearly raises the slowest block first, and sums over windows are cheap.
        """
        level_B = self.speed_B + _EMPTY_LEVEL * blocks_per_s
        ease_B = level_B**-_SHARPNESS - (level_B + blocks_per_s / max_blocks) ** -_SHARPNESS
        covered = window_sums((self.holders_B == 0).astype(np.float64), max_blocks)[
            first_start : last_start + 1
        ]
        replicated = window_sums((self.holders_B < replicas).astype(np.float64), max_blocks)
        eased = window_sums(ease_B, max_blocks)
        best = np.flatnonzero(covered == covered.max()) + first_start
        best = best[replicated[best] == replicated[best].max()]
        # Window sums of equal blocks differ in their last bits, which must not break ties.
        return int(best[np.argmax(eased[best] >= eased[best].max() * (1 - 1e-9))])


def water_fill(
    instance: PlacementProblem, starts_N: Ints, coverage: BlockCoverage, nodes: Sequence[int]
) -> None:
    """Place `nodes` in that order: writes their starts to `starts_N` and adds them to
    `coverage`."""
    rate_N = instance.blocks_per_s_N
    for node in nodes:
        most, rate = int(instance.max_blocks_N[node]), float(rate_N[node])
        starts_N[node] = fill_one(coverage, most, rate, instance.replicas)


def fill_one(coverage: BlockCoverage, max_blocks: int, blocks_per_s: float, replicas: int) -> int:
    """Add the best span for one more node to `coverage`; its start, 0 without any capacity."""
    if max_blocks == 0:
        return 0
    last = len(coverage.holders_B) - max_blocks
    start = coverage.best_start(max_blocks, blocks_per_s, replicas, 0, last)
    coverage.add_span(start, max_blocks, blocks_per_s)
    return start


FillOrder = Literal["memory", "speed", "near"]


_NUM_NEAR_GROUPS = 4
"""Groups of near nodes by which nodes are ordered if the recipe has no regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A heuristic: first up to `pipelines` pipelines, then coverage filling with all other nodes.

    Each pipeline is the best one of the nodes left; its nodes' spare capacity is filled as well.
    `searched`: find pipelines by search, else by rank, at almost no cost. `cut`: give a pipeline's
    blocks to its fastest nodes ("quickest"), or to all in proportion to speed ("even"). `order`:
    order in which the other nodes fill. `regions`: number of groups of near nodes, each filled by
    itself if it holds the model; 1 for the whole swarm.
    """

    name: str
    pipelines: int = 0
    searched: bool = True
    cut: Literal["quickest", "even"] = "quickest"
    order: FillOrder = "memory"
    regions: int = 1


RECIPES: tuple[Recipe, ...] = (
    Recipe(name="pipeline", pipelines=1),
    Recipe(name="pipelines", pipelines=8),
    Recipe(name="even-pipelines", pipelines=8, cut="even"),
    Recipe(name="fill", order="memory"),
    Recipe(name="fill-fast", order="speed"),
    Recipe(name="fill-near", order="near"),
    Recipe(name="regions", regions=4),
    Recipe(name="pipeline-regions", pipelines=1, regions=4),
    Recipe(name="two-pipelines", pipelines=2),
    Recipe(name="four-pipelines", pipelines=4, order="speed"),
)


class Pipelines:
    """Disjoint pipelines: the best one of all nodes, the best one of the nodes left, and so on.

    Clients take turns. Pipelines are found on demand and shared by recipes.
    """

    def __init__(self, instance: PlacementProblem, *, searched: bool = True) -> None:
        self._instance = instance
        self._find = find_pipeline if searched else heuristic_pipeline
        self._free_N = instance.max_blocks_N > 0
        self._found: list[Chain] = []
        self._nearest_s_N: Floats | None = None
        self._exhausted = False

    def first(self, count: int) -> Sequence[Chain]:
        """The first `count` pipelines; fewer if the nodes do not suffice."""
        while len(self._found) < count and not self._exhausted:
            if self._nearest_s_N is None:
                self._nearest_s_N = nearest_transfer_s(self._instance.problem.transfer_s_NN)
            client = len(self._found) % len(self._instance.client_problems)
            free = np.flatnonzero(self._free_N)
            chain = self._find(self._instance.for_client(client), free, self._nearest_s_N)
            if chain is None:
                self._exhausted = True
            else:
                self._found.append(chain)
                self._free_N[[visit.node for visit in chain]] = False
        return self._found[:count]


def apply_recipe(
    instance: PlacementProblem, recipe: Recipe, pipelines: Pipelines | None = None
) -> Assignment:
    """The assignment made by `recipe`; every node holds as many blocks as fit.

    `pipelines`: searched pipelines of `instance` to reuse, if any.
    """
    blocks = instance.problem.num_blocks
    starts_N = np.zeros(instance.problem.num_nodes, dtype=np.int64)
    others = instance.others
    coverage = BlockCoverage(others.holders_B.copy(), others.speed_B())
    free_N = instance.max_blocks_N > 0
    if pipelines is None or not recipe.searched:
        pipelines = Pipelines(instance, searched=recipe.searched)
    for chain in pipelines.first(recipe.pipelines):
        if recipe.cut == "even":
            chain = cut_pipeline(instance, [visit.node for visit in chain], even_cuts)
        grow_spans(instance, starts_N, coverage, chain)
        free_N[[visit.node for visit in chain]] = False
    for group in _ordered_groups(instance, np.flatnonzero(free_N), recipe):
        if recipe.regions > 1 and int(instance.max_blocks_N[group].sum()) >= blocks:
            water_fill(instance, starts_N, BlockCoverage.empty(blocks), group.tolist())
            _add_spans(instance, starts_N, coverage, group)
        else:
            water_fill(instance, starts_N, coverage, group.tolist())
    return instance.assign_full_spans(starts_N)


def grow_spans(
    instance: PlacementProblem, starts_N: Ints, coverage: BlockCoverage, chain: Chain
) -> None:
    """Extend the spans of a pipeline's nodes to their capacity, where that helps most."""
    rate_N = instance.blocks_per_s_N
    for visit in chain:
        most = int(instance.max_blocks_N[visit.node])
        least = max(0, visit.end - most)
        greatest = min(visit.start, instance.problem.num_blocks - most)
        rate = float(rate_N[visit.node])
        start = coverage.best_start(most, rate, instance.replicas, least, greatest)
        starts_N[visit.node] = start
        coverage.add_span(start, most, rate)


def _add_spans(
    instance: PlacementProblem, starts_N: Ints, coverage: BlockCoverage, nodes: Ints
) -> None:
    rate_N = instance.blocks_per_s_N
    for node in nodes:
        coverage.add_span(
            int(starts_N[node]), int(instance.max_blocks_N[node]), float(rate_N[node])
        )


def _ordered_groups(instance: PlacementProblem, nodes: Ints, recipe: Recipe) -> Sequence[Ints]:
    """The filling nodes in order, by groups of near nodes, the largest group first."""
    if recipe.regions == 1 and recipe.order != "near":
        return [_order_nodes(instance, nodes, recipe.order)]
    group_N = cluster_nodes(
        instance, nodes, recipe.regions if recipe.regions > 1 else _NUM_NEAR_GROUPS
    )
    members = [nodes[group_N == group] for group in np.unique(group_N)]
    members.sort(key=lambda group: (-int(instance.max_blocks_N[group].sum()), int(group[0])))
    order: FillOrder = "memory" if recipe.order == "near" else recipe.order
    ordered = [_order_nodes(instance, group, order) for group in members]
    return ordered if recipe.regions > 1 or not ordered else [np.concatenate(ordered)]


def _order_nodes(instance: PlacementProblem, nodes: Ints, order: FillOrder) -> Ints:
    """`nodes` by capacity (small nodes fit into the gaps that large ones leave) or by speed."""
    size_N, rate_N = instance.max_blocks_N[nodes], instance.blocks_per_s_N[nodes]
    keys = (-rate_N, -size_N) if order == "memory" else (-size_N, -rate_N)
    return nodes[np.lexsort((nodes, *keys))]


def cluster_nodes(instance: PlacementProblem, nodes: Ints, count: int, rounds: int = 4) -> Ints:
    """The group number of each node, by k-medoids with at most `count` groups."""
    if not len(nodes):
        return np.zeros(0, dtype=np.int64)
    transfer_s_NN = instance.problem.transfer_s_NN
    centres = [int(nodes[np.argmin(instance.problem.entry_s_N[nodes])])]
    far_s_N = transfer_s_NN[nodes, centres[0]].copy()
    while len(centres) < min(count, len(nodes)):
        centres.append(int(nodes[np.argmax(far_s_N)]))
        np.minimum(far_s_N, transfer_s_NN[nodes, centres[-1]], out=far_s_N)
    for _ in range(rounds):
        group_N = transfer_s_NN[np.ix_(nodes, np.array(centres))].argmin(axis=1)
        settled = [
            _medoid(instance, nodes[group_N == group], centre)
            for group, centre in enumerate(centres)
        ]
        if settled == centres:
            break
        centres = settled
    groups_N: Ints = transfer_s_NN[np.ix_(nodes, np.array(centres))].argmin(axis=1)
    return groups_N


def _medoid(instance: PlacementProblem, members: Ints, otherwise: int, sample: int = 256) -> int:
    if not len(members):
        return otherwise
    some = members[:: max(1, len(members) // sample)]
    return int(some[instance.problem.transfer_s_NN[np.ix_(some, some)].sum(axis=0).argmin()])
