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

from nesa_node.routing.placement.bound import nearest_s
from nesa_node.routing.placement.cuts import even_cuts
from nesa_node.routing.placement.fill import Water, fill
from nesa_node.routing.placement.pipeline import cut_pipeline, find_pipeline, thumb_pipeline
from nesa_node.routing.placement.room import Layout, Room
from nesa_node.routing.problem import Chain, Floats, Ints

Order = Literal["memory", "speed", "near"]


_NEAR_GROUPS = 4
"""Groups of near nodes by which nodes are ordered if the recipe has no regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A heuristic: first up to `pipelines` pipelines, then water filling with all other nodes.

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
    order: Order = "memory"
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

    def __init__(self, room: Room, *, searched: bool = True) -> None:
        self._room = room
        self._find = find_pipeline if searched else thumb_pipeline
        self._free_N = room.most_N > 0
        self._found: list[Chain] = []
        self._nearest_s_N: Floats | None = None
        self._exhausted = False

    def first(self, count: int) -> Sequence[Chain]:
        """The first `count` pipelines; fewer if the nodes do not suffice."""
        while len(self._found) < count and not self._exhausted:
            if self._nearest_s_N is None:
                self._nearest_s_N = nearest_s(self._room.problem.transfer_s_NN)
            client = len(self._found) % len(self._room.clients)
            free = np.flatnonzero(self._free_N)
            chain = self._find(self._room.seen_by(client), free, self._nearest_s_N)
            if chain is None:
                self._exhausted = True
            else:
                self._found.append(chain)
                self._free_N[[visit.node for visit in chain]] = False
        return self._found[:count]


def lay_out(room: Room, recipe: Recipe, pipelines: Pipelines | None = None) -> Layout:
    """The assignment made by `recipe`; every node holds as many blocks as fit.

    `pipelines`: searched pipelines of `room` to reuse, if any.
    """
    blocks = room.problem.num_blocks
    starts_N = np.zeros(room.problem.num_nodes, dtype=np.int64)
    water = Water.none(blocks)
    free_N = room.most_N > 0
    if pipelines is None or not recipe.searched:
        pipelines = Pipelines(room, searched=recipe.searched)
    for chain in pipelines.first(recipe.pipelines):
        if recipe.cut == "even":
            chain = cut_pipeline(room, [visit.node for visit in chain], even_cuts)
        grow(room, starts_N, water, chain)
        free_N[[visit.node for visit in chain]] = False
    for group in _groups(room, np.flatnonzero(free_N), recipe):
        if recipe.regions > 1 and int(room.most_N[group].sum()) >= blocks:
            fill(room, starts_N, Water.none(blocks), group.tolist())
            _pour_again(room, starts_N, water, group)
        else:
            fill(room, starts_N, water, group.tolist())
    return room.widest(starts_N)


def grow(room: Room, starts_N: Ints, water: Water, chain: Chain) -> None:
    """Extend the spans of a pipeline's nodes to their capacity, where that helps most."""
    rate_N = room.blocks_per_s_N
    for visit in chain:
        most = int(room.most_N[visit.node])
        least = max(0, visit.end - most)
        greatest = min(visit.start, room.problem.num_blocks - most)
        rate = float(rate_N[visit.node])
        start = water.best_start(most, rate, room.replicas, least, greatest)
        starts_N[visit.node] = start
        water.pour(start, most, rate)


def _pour_again(room: Room, starts_N: Ints, water: Water, nodes: Ints) -> None:
    rate_N = room.blocks_per_s_N
    for node in nodes:
        water.pour(int(starts_N[node]), int(room.most_N[node]), float(rate_N[node]))


def _groups(room: Room, nodes: Ints, recipe: Recipe) -> Sequence[Ints]:
    """The filling nodes in order, by groups of near nodes, the largest group first."""
    if recipe.regions == 1 and recipe.order != "near":
        return [_ordered(room, nodes, recipe.order)]
    group_N = near_groups(room, nodes, recipe.regions if recipe.regions > 1 else _NEAR_GROUPS)
    members = [nodes[group_N == group] for group in np.unique(group_N)]
    members.sort(key=lambda group: (-int(room.most_N[group].sum()), int(group[0])))
    order: Order = "memory" if recipe.order == "near" else recipe.order
    ordered = [_ordered(room, group, order) for group in members]
    return ordered if recipe.regions > 1 or not ordered else [np.concatenate(ordered)]


def _ordered(room: Room, nodes: Ints, order: Order) -> Ints:
    """`nodes` by capacity (small nodes fit into the gaps that large ones leave) or by speed."""
    size_N, rate_N = room.most_N[nodes], room.blocks_per_s_N[nodes]
    keys = (-rate_N, -size_N) if order == "memory" else (-size_N, -rate_N)
    return nodes[np.lexsort((nodes, *keys))]


def near_groups(room: Room, nodes: Ints, count: int, rounds: int = 4) -> Ints:
    """The group number of each node, by k-medoids with at most `count` groups."""
    if not len(nodes):
        return np.zeros(0, dtype=np.int64)
    transfer_s_NN = room.problem.transfer_s_NN
    centres = [int(nodes[np.argmin(room.problem.entry_s_N[nodes])])]
    far_s_N = transfer_s_NN[nodes, centres[0]].copy()
    while len(centres) < min(count, len(nodes)):
        centres.append(int(nodes[np.argmax(far_s_N)]))
        np.minimum(far_s_N, transfer_s_NN[nodes, centres[-1]], out=far_s_N)
    for _ in range(rounds):
        group_N = transfer_s_NN[np.ix_(nodes, np.array(centres))].argmin(axis=1)
        settled = [
            _medoid(room, nodes[group_N == group], centre) for group, centre in enumerate(centres)
        ]
        if settled == centres:
            break
        centres = settled
    groups_N: Ints = transfer_s_NN[np.ix_(nodes, np.array(centres))].argmin(axis=1)
    return groups_N


def _medoid(room: Room, members: Ints, otherwise: int, sample: int = 256) -> int:
    if not len(members):
        return otherwise
    some = members[:: max(1, len(members) // sample)]
    return int(some[room.problem.transfer_s_NN[np.ix_(some, some)].sum(axis=0).argmin()])
