"""Replicas by load: when a swarm gets one, and when it gives one back."""

from __future__ import annotations

import time

import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.server.pool.demand import BUSY_S, IDLE_S, Demand, busiest_load, least_busy
from nesa_node.swarm.dht.pool_notices import WantedSwarm
from nesa_node.topology.snapshot import NodeState, Snapshot


def seen(*nodes: tuple[int, int, float]) -> Snapshot:
    """Nodes as first block, last block, load."""
    states = [
        NodeState(PeerId(f"{index}"), Span(first, last), load=load)
        for index, (first, last, load) in enumerate(nodes)
    ]
    return Snapshot(ModelId("org/one@00"), 8, tuple(states), time.time())


def wanted(least: int, most: int) -> WantedSwarm:
    return WantedSwarm(model="org/one", replicas=least, max_replicas=most, until=2e9)


@pytest.mark.parametrize(
    ("nodes", "load"),
    [
        ([], 0.0),
        ([(0, 8, 0.5)], 0.5),
        ([(0, 4, 0.2), (4, 8, 0.9)], 0.9),
        ([(0, 4, 0.2), (4, 8, 0.9), (4, 8, 0.1)], 0.5),
        ([(0, 8, 0.4), (2, 3, 1.0)], 0.7),
    ],
)
def test_load_is_that_of_the_busiest_block(
    nodes: list[tuple[int, int, float]], load: float
) -> None:
    assert busiest_load(seen(*nodes)) == pytest.approx(load)


def test_a_short_burst_changes_nothing() -> None:
    demand, now = Demand(wanted(1, 3), 1), 100.0
    for load in (0.9, 0.3, 0.9, 0.3):
        demand.update(demand.wanted, seen((0, 8, load)), now)
        now += BUSY_S / 2
    assert demand.replicas == 1


def test_a_lasting_load_adds_replicas_one_by_one_up_to_the_most() -> None:
    demand, replicas = Demand(wanted(1, 3), 1), []
    for step in range(8):
        demand.update(demand.wanted, seen((0, 8, 0.9)), 100.0 + step * BUSY_S)
        replicas.append(demand.replicas)
    assert replicas == [1, 2, 3, 3, 3, 3, 3, 3]


def test_an_idle_swarm_gives_replicas_back_late_and_keeps_the_least() -> None:
    demand = Demand(wanted(1, 2), 2)
    demand.update(demand.wanted, seen((0, 8, 0.0)), 100.0)
    demand.update(demand.wanted, seen((0, 8, 0.0)), 99.0 + IDLE_S)
    assert demand.replicas == 2
    for step in range(3):
        demand.update(demand.wanted, seen((0, 8, 0.0)), 100.0 + IDLE_S * (1 + step))
    assert demand.replicas == 1


def test_new_limits_hold_at_once() -> None:
    demand = Demand(wanted(1, 2), 2)
    demand.update(wanted(3, 4), None, 1.0)
    assert demand.replicas == 3
    demand.update(wanted(1, 1), None, 2.0)
    assert demand.replicas == 1


def test_only_a_swarm_that_stays_within_its_limits_and_load_gives_back() -> None:
    demands = {
        "needs all": Demand(wanted(2, 3), 2, load=0.1),
        "would be busy": Demand(wanted(1, 3), 2, load=0.5),
        "able": Demand(wanted(1, 3), 3, load=0.4),
        "idle": Demand(wanted(1, 3), 2, load=0.2),
    }
    assert least_busy(demands) is demands["idle"]
    del demands["idle"]
    assert least_busy(demands) is demands["able"]
    del demands["able"]
    assert least_busy(demands) is None
