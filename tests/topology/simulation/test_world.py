import numpy as np
import pytest

from nesa_node.topology.geography import great_circle_km, min_rtt_ms
from nesa_node.topology.simulation.devices import DEVICES, LLAMA_70B, choose_spans, find_device
from nesa_node.topology.simulation.world import make_world, region_coordinates


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 10, 100, 1000])
@pytest.mark.parametrize("num_blocks", [6, 80])
def test_every_block_is_held_twice_where_nodes_suffice(num_nodes: int, num_blocks: int) -> None:
    for seed in range(5):
        world = make_world(num_nodes, num_blocks, np.random.default_rng(seed))
        assert min(world.snapshot.coverage()) >= (0 if num_nodes == 1 else 1)
        if num_nodes >= 10:
            assert min(world.snapshot.coverage()) >= 2


def test_world_is_what_it_promises() -> None:
    world = make_world(300, 80, np.random.default_rng(0), num_clients=5)
    links = world.links
    assert np.array_equal(links.rtt_ms_NN, links.rtt_ms_NN.T)
    assert (np.diag(links.rtt_ms_NN) == 0).all()
    assert (links.rtt_ms_NN[~np.eye(300, dtype=bool)] > 0).all()
    assert np.isfinite(links.rtt_ms_NN).all()
    assert world.client_rtt_ms_CN.shape == world.client_up_bytes_per_s_CN.shape == (5, 300)
    assert world.client_down_bytes_per_s_CN.shape == (5, 300)
    nodes = world.snapshot.nodes
    assert all(0 <= node.load <= 0.95 for node in nodes)
    assert all(0 < len(node.span) <= node.max_blocks for node in nodes)
    assert all(node.span.end <= 80 for node in nodes)
    assert np.mean([node.reliability for node in nodes]) == pytest.approx(0.95, abs=0.02)
    homes = world.access_N.residential_A
    reliability_N = np.array([node.reliability for node in nodes])
    assert reliability_N[homes].mean() < reliability_N[~homes].mean()
    # A node at home sends slower than it receives.
    assert np.median(links.rate_bytes_per_s_NN[homes][:, ~homes]) < np.median(
        links.rate_bytes_per_s_NN[~homes][:, homes]
    )


def test_same_seed_gives_the_same_world() -> None:
    one, other = (make_world(40, 20, np.random.default_rng(3)) for _ in range(2))
    assert one.snapshot.nodes == other.snapshot.nodes
    assert np.array_equal(one.links.rtt_ms_NN, other.links.rtt_ms_NN)
    assert np.array_equal(one.client_rtt_ms_CN, other.client_rtt_ms_CN)
    third = make_world(40, 20, np.random.default_rng(4))
    assert not np.array_equal(one.links.rtt_ms_NN, third.links.rtt_ms_NN)


def test_no_round_trip_is_faster_than_light_between_exchanges() -> None:
    world = make_world(200, 80, np.random.default_rng(1))
    places_N2 = region_coordinates(world.regions)[world.region_N]
    off_diagonal = ~np.eye(200, dtype=bool)
    least_NN = min_rtt_ms(places_N2, places_N2)
    assert (world.links.rtt_ms_NN > least_NN)[off_diagonal].all()


def test_some_triangles_are_violated() -> None:
    rtt_NN = make_world(60, 80, np.random.default_rng(2)).links.rtt_ms_NN
    violated_NNN = rtt_NN[:, None, :] > rtt_NN[:, :, None] + rtt_NN[None, :, :]
    assert 0.01 < violated_NNN.mean() < 0.2


def test_great_circle_of_known_cities() -> None:
    paris_new_york = great_circle_km([(48.86, 2.35)], [(40.71, -74.01)])
    assert paris_new_york[0, 0] == pytest.approx(5837, rel=0.005)


def test_nodes_without_room_for_a_block_hold_one() -> None:
    spans = choose_spans(np.array([0, 3]), 3, np.random.default_rng(0))
    assert len(spans[0]) == 1


def test_devices_rank_as_their_data_sheets_do() -> None:
    slow_to_fast = ["laptop-cpu", "gtx1060", "rtx3060", "rtx3090", "rtx4090", "a100", "h100"]
    times = [DEVICES[name].decode_block_s() for name in slow_to_fast]
    assert times == sorted(times, reverse=True)
    assert DEVICES["a100"].max_blocks(LLAMA_70B, "nf4") > DEVICES["a100"].max_blocks(LLAMA_70B)
    assert find_device("RTX 3090") is DEVICES["rtx3090"]


def test_impossible_worlds_are_refused() -> None:
    for nodes, blocks, regions in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 99)):
        with pytest.raises(ValueError, match="got"):
            make_world(nodes, blocks, np.random.default_rng(0), num_regions=regions)


def test_memory_of_nodes_holds_their_blocks_and_the_used_part_of_their_cache() -> None:
    """A tenth of the memory is for the cache; laptops have no memory of a GPU."""
    world = make_world(40, 80, np.random.default_rng(3))
    kinds = set()
    for node in world.snapshot.nodes:
        total, free = node.gpu_memory_total_bytes, node.gpu_memory_free_bytes
        kinds.add(total > 0)
        if total == 0:
            total, free = node.cpu_memory_total_bytes, node.cpu_memory_free_bytes
        weights = LLAMA_70B.weight_bytes(node.quantization) * len(node.span)
        used_cache = total * 0.1 * (1 - node.free_cache_tokens / node.total_cache_tokens)
        assert free == pytest.approx(max(total - weights - used_cache, 0), abs=2e-3 * total)
    assert kinds == {True, False}
