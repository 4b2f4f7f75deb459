import numpy as np
import pytest

from benchmarks.routing_worlds import world_from_round_trips
from nesa_node.core.errors import ConfigError
from nesa_node.topology.geography import min_rtt_ms
from nesa_node.topology.simulation.world import populate, region_coordinates
from nesa_node.topology.tables import TABLE_NAMES, load_table


@pytest.mark.parametrize("name", TABLE_NAMES)
def test_tables_are_whole_and_name_their_source(name: str) -> None:
    table = load_table(name)
    size = len(table.regions)
    assert table.source
    assert table.licence
    assert len({region.name for region in table.regions}) == size
    assert table.rtt_ms_RR.shape == (size, size)
    assert np.array_equal(table.rtt_ms_RR, table.rtt_ms_RR.T)
    assert (table.rtt_ms_RR > 0).all()


@pytest.mark.parametrize("name", TABLE_NAMES)
def test_tables_obey_the_speed_of_light(name: str) -> None:
    table = load_table(name)
    least_RR = min_rtt_ms(region_coordinates(table.regions), region_coordinates(table.regions))
    assert (table.rtt_ms_RR >= least_RR).all()


def test_unknown_table_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'mars'.*gcp"):
        load_table("mars")


def test_world_from_a_table_has_its_round_trips() -> None:
    table = load_table()
    world = populate(table.regions, table.rtt_ms_RR, 200, 80, np.random.default_rng(0))
    between_NN = table.rtt_ms_RR[np.ix_(world.region_N, world.region_N)]
    own_NN = world.links.rtt_ms_NN - world.access_N.rtt_ms_A - world.access_N.rtt_ms_A[:, None]
    ratio_NN = (own_NN / between_NN)[world.region_N[:, None] != world.region_N[None, :]]
    assert np.median(ratio_NN) == pytest.approx(1.0, abs=0.01)
    assert min(world.snapshot.coverage()) >= 2


def test_world_from_a_matrix_has_its_round_trips() -> None:
    rng = np.random.default_rng(0)
    rtt_NN = rng.uniform(10, 100, (30, 30))
    rtt_NN = np.minimum(rtt_NN, rtt_NN.T)
    np.fill_diagonal(rtt_NN, 0.0)
    world = world_from_round_trips(rtt_NN, 20, rng, num_clients=3)
    assert np.array_equal(world.links.rtt_ms_NN, rtt_NN)
    assert world.client_rtt_ms_CN.shape == (3, 30)
    assert (world.client_rtt_ms_CN > 0).all()
