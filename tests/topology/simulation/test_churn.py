import numpy as np
import pytest

from benchmarks.routing_worlds import world_from_round_trips
from nesa_node.core.ids import PeerId
from nesa_node.topology.simulation.world import World, make_world
from tests.topology.simulation.churn import apply_churn, simulate_churn, with_jitter

WORLD = make_world(60, 20, np.random.default_rng(0))


def _check(world: World) -> None:
    links, count = world.links, world.num_nodes
    assert links.peers == tuple(node.peer_id for node in world.snapshot.nodes)
    assert len(set(links.peers)) == count
    assert np.array_equal(links.rtt_ms_NN, links.rtt_ms_NN.T)
    assert (links.rtt_ms_NN[~np.eye(count, dtype=bool)] > 0).all()
    assert not np.isnan(links.rate_bytes_per_s_NN).any()
    assert len(world.region_N) == len(world.device_N) == len(world.access_N) == count
    for array in (
        world.client_rtt_ms_CN,
        world.client_up_bytes_per_s_CN,
        world.client_down_bytes_per_s_CN,
    ):
        assert array.shape == (world.num_clients, count)
        assert (array > 0).all()


def test_swarm_keeps_its_size_and_changes_its_nodes() -> None:
    *_, last = simulate_churn(WORLD, 60, np.random.default_rng(1), leave_fraction=0.05)
    _check(last)
    assert 30 < last.num_nodes < 100
    before = {node.peer_id for node in WORLD.snapshot.nodes}
    after = {node.peer_id for node in last.snapshot.nodes}
    assert after - before
    assert before - after
    assert last.snapshot.taken_at == pytest.approx(59 * 60.0)


def test_who_stays_keeps_place_span_and_links() -> None:
    later = apply_churn(WORLD, np.random.default_rng(2), leave_fraction=0.2)
    _check(later)
    old = {node.peer_id: node for node in WORLD.snapshot.nodes}
    staying = [node for node in later.snapshot.nodes if node.peer_id in old]
    assert 30 < len(staying) < 60
    for node in staying:
        assert node.span == old[node.peer_id].span
        assert node.location == old[node.peer_id].location
    first, second = staying[0].peer_id, staying[1].peer_id
    assert later.links.rtt_ms(first, second) == WORLD.links.rtt_ms(first, second)


def test_no_id_is_used_twice() -> None:
    seen: set[PeerId] = set()
    gone: set[PeerId] = set()
    for world in simulate_churn(WORLD, 30, np.random.default_rng(3), leave_fraction=0.1):
        now = {node.peer_id for node in world.snapshot.nodes}
        assert not now & gone
        gone |= seen - now
        seen |= now


def test_jitter_does_not_add_up() -> None:
    worlds = list(
        simulate_churn(WORLD, 40, np.random.default_rng(4), leave_fraction=0.0, jitter=0.05)
    )
    ratio = worlds[-1].links.rtt_ms_NN[0, 1:] / WORLD.links.rtt_ms_NN[0, 1:]
    assert np.std(np.log(ratio)) < 0.1
    assert np.array_equal(
        with_jitter(WORLD, np.random.default_rng(0), 0.0).links.rtt_ms_NN[0],
        WORLD.links.rtt_ms_NN[0],
    )


def test_unreliable_nodes_leave_sooner() -> None:
    left: list[float] = []
    stayed: list[float] = []
    for seed in range(20):
        later = apply_churn(
            WORLD, np.random.default_rng(seed), leave_fraction=0.1, expected_joins=0
        )
        there = {node.peer_id for node in later.snapshot.nodes}
        for node in WORLD.snapshot.nodes:
            (stayed if node.peer_id in there else left).append(node.reliability)
    assert np.mean(left) < np.mean(stayed)


def test_newcomers_take_what_nobody_holds() -> None:
    rng = np.random.default_rng(5)
    world = apply_churn(WORLD, rng, leave_fraction=0.97, expected_joins=0)
    assert min(world.snapshot.coverage()) < 2
    for _ in range(3):
        world = apply_churn(world, rng, leave_fraction=0.0, expected_joins=8)
    assert min(world.snapshot.coverage()) >= 2


def test_last_node_stays() -> None:
    world = apply_churn(WORLD, np.random.default_rng(6), leave_fraction=1e9, expected_joins=0)
    assert world.num_nodes == 1
    _check(world)


def test_nobody_joins_a_measured_matrix() -> None:
    rtt_NN = WORLD.links.rtt_ms_NN
    world = world_from_round_trips(rtt_NN, 20, np.random.default_rng(0))
    later = apply_churn(world, np.random.default_rng(0), leave_fraction=0.2, expected_joins=10)
    _check(later)
    assert {node.peer_id for node in later.snapshot.nodes} < set(world.links.peers)
