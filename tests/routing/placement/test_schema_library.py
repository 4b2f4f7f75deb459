"""Schemas learnt from stored snapshots, and how they start a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement import schema_library as precompute_module
from nesa_node.routing.placement.placement_problem import make_placement_problem
from nesa_node.routing.placement.rebalance import RebalancePolicy, rebalance
from nesa_node.routing.placement.schema_library import (
    MAX_REGRET,
    MIN_SNAPSHOTS,
    PrecomputedLibrary,
    mean_regret,
    precompute_library,
    snapshot_placement_problem,
)
from nesa_node.routing.placement.schemas import (
    CANDIDATE_SCHEMAS,
    SchemaLibrary,
    choose_schema,
    placement_features,
    schema_costs,
)
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import Snapshot
from tests.topology.simulation.churn import simulate_churn


def history(count: int) -> list[Snapshot]:
    """Two kinds of swarm in turns: near each other, and all over the world."""
    found = []
    for seed, regions in ((0, 1), (1, 8)):
        rng = np.random.default_rng(seed)
        world = make_world(14, 12, rng, num_regions=regions)
        for each in simulate_churn(world, count // 2, rng):
            nodes = tuple(replace(node, max_blocks=6) for node in each.snapshot.nodes)
            found.append(replace(each.snapshot, nodes=nodes))
    return found


def learnt(snapshots: list[Snapshot], seconds: float = 1000.0) -> PrecomputedLibrary:
    ticks = itertools.count()
    return precompute_library(
        snapshots,
        np.random.default_rng(0),
        goal="latency",
        replicas=2,
        seconds=seconds,
        clock=lambda: float(next(ticks)),
    )


def test_too_few_snapshots_or_too_little_time_give_no_schemas() -> None:
    assert learnt(history(6)).library is None
    hurried = learnt(history(2 * MIN_SNAPSHOTS), seconds=3.0)
    assert hurried.library is None
    assert "3 s suffice for 3 snapshots" in hurried.reason


def test_schemas_learnt_from_a_store_are_near_the_best_for_what_comes_later() -> None:
    snapshots = history(40)
    found = learnt(snapshots[::2])
    assert found.library is not None
    assert found.regret is not None
    assert found.regret <= MAX_REGRET
    assert str(len(found.library.clusters)) in found.reason
    rooms = [snapshot_placement_problem(snapshot, 2) for snapshot in snapshots[1::8]]
    cost_WS = schema_costs(rooms, CANDIDATE_SCHEMAS, "latency")
    features_W = [
        placement_features(room, with_homology=_has_shape(found.library)) for room in rooms
    ]
    by_hand = []
    for room, cost_S in zip(rooms, cost_WS, strict=True):
        choice = choose_schema(found.library, room)
        names = [schema.name for schema in CANDIDATE_SCHEMAS]
        by_hand.append(cost_S[names.index(choice.schema.name)] / cost_S.min() - 1)
    assert np.mean(by_hand) == pytest.approx(mean_regret(found.library, cost_WS, features_W))
    assert np.mean(by_hand) <= MAX_REGRET


def test_a_plan_that_starts_from_a_schema_gains_at_least_as_much() -> None:
    """What a start adds is looked at beside everything else while nodes are few."""
    gains = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        world = make_world(16, 12, rng)
        request = ChainRequest(span=Span(0, 12), entry_rtt_ms=world.client_rtt_ms_CN[0])
        # All hold the same blocks as far as they can: there is much to gain.
        nodes = tuple(
            replace(node, max_blocks=4, span=Span(4 * (row % 3), 4 * (row % 3) + 4))
            for row, node in enumerate(world.snapshot.nodes)
        )
        snapshot = replace(world.snapshot, nodes=nodes)
        room = make_placement_problem(snapshot, request, replicas=1)
        found = learnt([snapshot] * MIN_SNAPSHOTS)
        assert found.library is not None
        start = choose_schema(found.library, room).layout
        policy = RebalancePolicy(min_gain=0.0)
        plain, started = (
            rebalance(snapshot, request, replicas=1, policy=policy, start=layout)
            for layout in (None, start)
        )
        assert started.gain - started.cost_s / 3600 >= plain.gain - plain.cost_s / 3600 - 1e-9
        gains.append(started.gain)
    assert max(gains) > 0


def test_schemas_that_choose_badly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute_module, "mean_regret", lambda *_: 0.06)
    found = learnt(history(2 * MIN_SNAPSHOTS))
    assert found.library is None
    assert found.regret == 0.06
    assert "more than 5%" in found.reason


@pytest.mark.parametrize("shape", [True, False])
def test_features_of_shape_are_used_where_they_choose_better_on_later_snapshots(
    shape: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def regret(library: SchemaLibrary, *_: object) -> float:
        return 0.01 if _has_shape(library) == shape else 0.02

    monkeypatch.setattr(precompute_module, "mean_regret", regret)
    snapshots = history(2 * MIN_SNAPSHOTS)
    found = learnt(snapshots)
    assert found.library is not None
    assert _has_shape(found.library) == shape
    assert (found.regret, found.other_regret) == (0.01, 0.02)
    assert ("with features of shape (2.0% without)" in found.reason) == shape
    choose_schema(found.library, snapshot_placement_problem(snapshots[0], 2))


def _has_shape(library: SchemaLibrary) -> bool:
    return any(name.startswith("h1.") for name in library.features)
