import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.topology.geography import CITIES, least_rtt_ms
from nesa_node.topology.vivaldi import (
    DIMENSIONS,
    MAX_STEP_MS,
    Cloud,
    Coordinate,
    first_guess,
    predict_ms,
    settle,
    update,
)
from nesa_node.topology.worlds import make_world, places

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
COORDINATES = st.builds(
    Coordinate, st.lists(ANY_FLOAT, max_size=5).map(tuple), ANY_FLOAT, ANY_FLOAT
)


def _start(size: int) -> Cloud:
    return Cloud(np.zeros((size, DIMENSIONS)), np.full(size, 10.0), np.ones(size))


@given(COORDINATES, ANY_FLOAT)
def test_nothing_that_a_peer_says_breaks_a_coordinate(other: Coordinate, rtt_ms: float) -> None:
    own = Coordinate((3.0, 4.0, 0.0), 5.0, 0.4)
    moved = update(own, other, rtt_ms, np.random.default_rng(0))
    assert moved.is_sane
    step_ms = math.dist(moved.position_ms, own.position_ms) + abs(moved.height_ms - own.height_ms)
    assert step_ms <= 2 * MAX_STEP_MS


def test_nonsense_changes_nothing() -> None:
    own, rng = Coordinate(), np.random.default_rng(0)
    for rtt_ms in (math.nan, math.inf, -1.0, 0.0, 1e9):
        assert update(own, Coordinate(), rtt_ms, rng) is own
    assert update(own, Coordinate((math.nan, 0.0, 0.0)), 10.0, rng) is own
    assert update(own, Coordinate((0.0,)), 10.0, rng) is own


def test_two_nodes_agree_on_their_round_trip() -> None:
    rng = np.random.default_rng(0)
    one, other = Coordinate(), Coordinate()
    for _ in range(200):
        one, other = update(one, other, 80.0, rng), update(other, one, 80.0, rng)
    assert predict_ms(one, other) == pytest.approx(80.0, rel=0.02)
    assert max(one.error, other.error) < 0.1


def test_live_updates_learn_a_whole_world() -> None:
    world = make_world(40, 80, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    coordinates = [Coordinate() for _ in range(40)]
    for _ in range(150):
        for node in range(40):
            other = int(rng.integers(40))
            if other != node:
                rtt_ms = float(world.links.rtt_ms_NN[node, other])
                coordinates[node] = update(coordinates[node], coordinates[other], rtt_ms, rng)
    predicted_NN = Cloud.of(coordinates).predict_ms_NN()
    off = np.triu_indices(40, 1)
    error = np.abs(predicted_NN - world.links.rtt_ms_NN)[off] / world.links.rtt_ms_NN[off]
    assert np.median(error) < 0.2


def test_liars_among_peers_do_not_drag_the_others_away() -> None:
    """A tenth of the nodes claim random places and certainty, and delay their answers."""
    world = make_world(60, 80, np.random.default_rng(3))
    liars = 6
    errors = []
    for lying in (False, True):
        rng = np.random.default_rng(1)
        coordinates = [Coordinate() for _ in range(60)]
        for _ in range(200):
            for node in range(liars, 60):
                other = int(rng.integers(60))
                rtt_ms = float(world.links.rtt_ms_NN[node, other])
                claimed = coordinates[other]
                if other < liars:
                    if not lying:
                        continue
                    claimed = Coordinate(tuple(rng.uniform(-1000, 1000, 3)), 0.1, 0.0)
                    rtt_ms += float(rng.uniform(0, 1000))
                coordinates[node] = update(coordinates[node], claimed, rtt_ms, rng)
        predicted_NN = Cloud.of(coordinates[liars:]).predict_ms_NN()
        true_NN = world.links.rtt_ms_NN[liars:, liars:]
        off = np.triu_indices(60 - liars, 1)
        errors.append(np.median(np.abs(predicted_NN - true_NN)[off] / true_NN[off]))
    honest, attacked = errors
    assert honest < 0.2
    assert attacked < 0.5


def test_prediction_of_a_cloud_is_that_of_its_coordinates() -> None:
    rng = np.random.default_rng(0)
    cloud = Cloud(rng.normal(0, 50, (5, DIMENSIONS)), rng.uniform(1, 9, 5), np.ones(5))
    predicted_NN = cloud.predict_ms_NN()
    for one, other in pairwise(range(5)):
        expected = predict_ms(cloud.coordinate(one), cloud.coordinate(other))
        assert predicted_NN[one, other] == pytest.approx(expected)


def test_unmeasured_nodes_stay_where_they_are() -> None:
    rtt_NN = np.array([[0.0, 50.0, np.nan], [50.0, 0.0, np.nan], [np.nan, np.nan, 0.0]])
    settled = settle(rtt_NN, _start(3), np.random.default_rng(0))
    assert settled.coordinate(2) == _start(3).coordinate(2)
    assert settled.predict_ms_NN()[0, 1] == pytest.approx(50.0, rel=0.05)
    nobody = settle(np.full((2, 2), np.nan), _start(2), np.random.default_rng(0))
    assert nobody.coordinate(0) == Coordinate()


def test_first_guess_of_far_places_is_far() -> None:
    cities = {city.name: (city.latitude, city.longitude) for city in CITIES}
    one, other = first_guess(cities["london"]), first_guess(cities["sydney"])
    near = first_guess(cities["paris"])
    least = least_rtt_ms(places(CITIES), places(CITIES)).max()
    assert predict_ms(one, near) < 30 < 0.8 * least < predict_ms(one, other)
    assert first_guess((math.nan, 0.0)) == first_guess(None) == Coordinate()
