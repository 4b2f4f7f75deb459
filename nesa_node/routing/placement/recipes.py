"""Rules that lay the nodes of any swarm out: what planners try, and what schemas are made of.

Each is cheap next to a search, and none is best everywhere. Pipelines suit few sessions that want
answers soon, filling suits many. A region that holds the whole model saves its clients the way
abroad, and one that does not can be a part of a pipeline through several.
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
"""That nodes are ordered by, where order is all that matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`pipelines` are laid first, each the best of the nodes that are left, at most so many; what
    they hold beyond what they run, and all other nodes, fill up where the swarm is narrowest.

    `searched`: pipelines are searched for; else the nodes that promise most are taken, which costs
    next to nothing. `cut`: a pipeline's blocks go to its fastest nodes, or to all in proportion to
    speed. `order`: of the nodes that fill. `regions`: fill each of so many groups of near nodes for
    itself, if it holds the model; 1 for the swarm as a whole.
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
    """The best pipeline of all nodes, the best of the nodes that it leaves, and so on.

    For one client after the other, found when asked for: recipes share them.
    """

    def __init__(self, room: Room, *, searched: bool = True) -> None:
        self._room = room
        self._find = find_pipeline if searched else thumb_pipeline
        self._free_N = room.most_N > 0
        self._found: list[Chain] = []
        self._nearest_s_N: Floats | None = None
        self._exhausted = False

    def first(self, count: int) -> Sequence[Chain]:
        """At most `count`; fewer if the nodes suffice for no more."""
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
    """The layout that the recipe gives; every node holds as much as fits into it.

    `pipelines` are those searched for in the room, if that has been done before.
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
    """Let the nodes of a pipeline hold what fits around what they run, where that helps most."""
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
    """The nodes that fill, in groups of near ones, the largest group first, and in order."""
    if recipe.regions == 1 and recipe.order != "near":
        return [_ordered(room, nodes, recipe.order)]
    group_N = near_groups(room, nodes, recipe.regions if recipe.regions > 1 else _NEAR_GROUPS)
    members = [nodes[group_N == group] for group in np.unique(group_N)]
    members.sort(key=lambda group: (-int(room.most_N[group].sum()), int(group[0])))
    order: Order = "memory" if recipe.order == "near" else recipe.order
    ordered = [_ordered(room, group, order) for group in members]
    return ordered if recipe.regions > 1 or not ordered else [np.concatenate(ordered)]


def _ordered(room: Room, nodes: Ints, order: Order) -> Ints:
    """Large nodes first leave holes that small ones fit into; fast ones first spread speed."""
    size_N, rate_N = room.most_N[nodes], room.blocks_per_s_N[nodes]
    keys = (-rate_N, -size_N) if order == "memory" else (-size_N, -rate_N)
    return nodes[np.lexsort((nodes, *keys))]


def near_groups(room: Room, nodes: Ints, count: int, rounds: int = 4) -> Ints:
    """The number of each node's group, of `count` at most: around medoids far from each other."""
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
