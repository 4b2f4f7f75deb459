"""Schema libraries: precomputed from the stored snapshots of a live swarm.

The newest snapshots are held out: a library is used only if its choices have little regret there,
and is then learnt again from all snapshots.

W snapshots, S schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.placement.capacity import make_room
from nesa_node.routing.placement.room import Room
from nesa_node.routing.placement.schemas import (
    SCHEMAS,
    TRIES,
    Library,
    costs_of,
    features_of_room,
    learn,
)
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.problem import Floats
from nesa_node.routing.recorded import spread
from nesa_node.topology.snapshot import Snapshot

LEAST = 16
"""Snapshots needed for a library."""
MOST = 96
HELD_OUT = 1 / 3
MAX_REGRET = 0.05


@dataclass(frozen=True, slots=True)
class Precomputed:
    """A schema library, or None if none is worth using, with the reason.

    `regret`: mean relative excess, on held-out snapshots, of the chosen schema over the best one.
    """

    library: Library | None
    reason: str
    regret: float | None = None
    snapshots: int = 0


def precompute(
    snapshots: Sequence[Snapshot],
    rng: np.random.Generator,
    *,
    goal: Goal,
    replicas: int,
    seconds: float,
    clock: Callable[[], float],
) -> Precomputed:
    """A library for the swarm of `snapshots` (oldest first), in about `seconds` of `clock`."""
    chosen = spread(snapshots, MOST)
    if len(chosen) < LEAST:
        return Precomputed(None, f"{len(chosen)} snapshots are too few, {LEAST} are needed")
    blocks = chosen[-1].num_blocks
    chosen = [snapshot for snapshot in chosen if snapshot.num_blocks == blocks]
    began = clock()
    costs_of([room_of(chosen[0], replicas)], SCHEMAS, goal)
    chosen = spread(chosen, int(seconds / max(clock() - began, 1e-6)))
    if len(chosen) < LEAST:
        return Precomputed(None, f"{seconds:g} s suffice for {len(chosen)} snapshots only")
    rooms = [room_of(snapshot, replicas) for snapshot in chosen]
    cost_WS = costs_of(rooms, SCHEMAS, goal)
    features_W = [features_of_room(room, shape=False) for room in rooms]
    cut = round(len(rooms) * (1 - HELD_OUT))

    def learnt(count: int) -> Library:
        return learn(
            cost_WS[:count], features_W[:count], SCHEMAS, rng, num_blocks=blocks, goal=goal
        )

    regret = mean_regret(learnt(cut), cost_WS[cut:], features_W[cut:])
    found = f"{regret:.1%} above the best schema on {len(rooms) - cut} held-out snapshots"
    if regret > MAX_REGRET:
        return Precomputed(None, f"{found}: more than {MAX_REGRET:.0%}", regret, len(rooms))
    library = learnt(len(rooms))
    kinds = f"{len(library.kinds)} kinds of topology in {len(rooms)} snapshots"
    return Precomputed(library, f"{found}; {kinds}", regret, len(rooms))


def room_of(snapshot: Snapshot, replicas: int) -> Room:
    """The placement problem of `snapshot` for a client at an unknown place."""
    request = Request(span=Span(0, snapshot.num_blocks))
    return make_room(snapshot, request, replicas=replicas)


def mean_regret(library: Library, cost_WS: Floats, features_W: Sequence[dict[str, float]]) -> float:
    """Mean relative excess of the best tried schema over the best of all schemas."""
    regrets = []
    for cost_S, features in zip(cost_WS, features_W, strict=True):
        schemas = np.array(library.kinds[library.kind_of(features)].schemas)
        tried = schemas[np.argsort(library.expected(features)[schemas], kind="stable")[:TRIES]]
        regrets.append(cost_S[tried].min() / cost_S.min() - 1.0)
    return float(np.mean(regrets))
