"""Schemas learnt from stored snapshots, and how they start a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.placement import precompute as precompute_module
from nesa_node.routing.placement.capacity import make_room
from nesa_node.routing.placement.precompute import (
    LEAST,
    MAX_REGRET,
    Precomputed,
    mean_regret,
    precompute,
    room_of,
)
from nesa_node.routing.placement.rebalance import Policy, rebalance
from nesa_node.routing.placement.schemas import (
    SCHEMAS,
    choose_schema,
    costs_of,
    features_of_room,
)
from nesa_node.topology.churn import steps
from nesa_node.topology.snapshot import Snapshot
from nesa_node.topology.worlds import make_world


def history(count: int) -> list[Snapshot]:
    """Two kinds of swarm in turns: near each other, and all over the world."""
    found = []
    for seed, regions in ((0, 1), (1, 8)):
        rng = np.random.default_rng(seed)
        world = make_world(14, 12, rng, num_regions=regions)
        for each in steps(world, count // 2, rng):
            nodes = tuple(replace(node, max_blocks=6) for node in each.snapshot.nodes)
            found.append(replace(each.snapshot, nodes=nodes))
    return found


def learnt(snapshots: list[Snapshot], seconds: float = 1000.0) -> Precomputed:
    ticks = itertools.count()
    return precompute(
        snapshots,
        np.random.default_rng(0),
        goal="latency",
        replicas=2,
        seconds=seconds,
        clock=lambda: float(next(ticks)),
    )


def test_too_few_snapshots_or_too_little_time_give_no_schemas() -> None:
    assert learnt(history(6)).library is None
    hurried = learnt(history(2 * LEAST), seconds=3.0)
    assert hurried.library is None
    assert "3 s suffice for 3 snapshots" in hurried.reason


def test_schemas_learnt_from_a_store_are_near_the_best_for_what_comes_later() -> None:
    snapshots = history(40)
    found = learnt(snapshots[::2])
    assert found.library is not None
    assert found.regret is not None
    assert found.regret <= MAX_REGRET
    assert str(len(found.library.kinds)) in found.reason
    rooms = [room_of(snapshot, 2) for snapshot in snapshots[1::8]]
    cost_WS = costs_of(rooms, SCHEMAS, "latency")
    features_W = [features_of_room(room, shape=False) for room in rooms]
    by_hand = []
    for room, cost_S in zip(rooms, cost_WS, strict=True):
        choice = choose_schema(found.library, room)
        names = [schema.name for schema in SCHEMAS]
        by_hand.append(cost_S[names.index(choice.schema.name)] / cost_S.min() - 1)
    assert np.mean(by_hand) == pytest.approx(mean_regret(found.library, cost_WS, features_W))
    assert np.mean(by_hand) <= MAX_REGRET


def test_a_plan_that_starts_from_a_schema_gains_at_least_as_much() -> None:
    """What a start adds is looked at beside everything else while nodes are few."""
    gains = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        world = make_world(16, 12, rng)
        request = Request(span=Span(0, 12), entry_rtt_ms=world.client_rtt_ms_CN[0])
        # All hold the same blocks as far as they can: there is much to gain.
        nodes = tuple(
            replace(node, max_blocks=4, span=Span(4 * (row % 3), 4 * (row % 3) + 4))
            for row, node in enumerate(world.snapshot.nodes)
        )
        snapshot = replace(world.snapshot, nodes=nodes)
        room = make_room(snapshot, request, replicas=1)
        found = learnt([snapshot] * LEAST)
        assert found.library is not None
        start = choose_schema(found.library, room).layout
        policy = Policy(min_gain=0.0)
        plain, started = (
            rebalance(snapshot, request, replicas=1, policy=policy, start=layout)
            for layout in (None, start)
        )
        assert started.gain - started.cost_s / 3600 >= plain.gain - plain.cost_s / 3600 - 1e-9
        gains.append(started.gain)
    assert max(gains) > 0


def test_schemas_that_choose_badly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute_module, "mean_regret", lambda *_: 0.06)
    found = learnt(history(2 * LEAST))
    assert found.library is None
    assert found.regret == 0.06
    assert "more than 5%" in found.reason
