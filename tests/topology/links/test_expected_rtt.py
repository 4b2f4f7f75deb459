from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.topology.links.expected_rtt import (
    MAX_STEP_MS,
    NUM_DIMENSIONS,
    NetworkCoordinates,
    fit_coordinates,
    update_coordinates,
)
from nesa_node.topology.simulation.world import make_world

MEASURED = st.floats(min_value=1e-3, max_value=1e12)


def _start(size: int) -> NetworkCoordinates:
    return NetworkCoordinates(np.zeros((size, NUM_DIMENSIONS)), np.full(size, 10.0), np.ones(size))


@given(MEASURED, st.integers(0, 2**32 - 1))
def test_no_measurement_moves_a_node_far(rtt_ms: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    other = NetworkCoordinates(
        rng.uniform(-1000, 1000, (1, NUM_DIMENSIONS)), rng.uniform(0.1, 1000, 1), np.zeros(1)
    )
    moved = update_coordinates(_start(1), other, np.array([rtt_ms]), rng)
    step_ms = float(np.linalg.norm(moved.position_ms_NK)) + abs(float(moved.height_ms_N[0]) - 10)
    assert step_ms <= 2 * MAX_STEP_MS + 1e-9
    assert np.isfinite(moved.position_ms_NK).all()


def test_settled_coordinates_learn_a_whole_world_from_a_third_of_its_pairs() -> None:
    world = make_world(40, 80, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    seen_NN = np.triu(rng.random((40, 40)) < 1 / 3, 1)
    seen_NN |= seen_NN.T
    shown_NN = np.where(seen_NN, world.links.rtt_ms_NN, np.nan)
    predicted_NN = fit_coordinates(shown_NN, _start(40), rng).predict_ms_NN()
    hidden = np.nonzero(np.triu(~seen_NN, 1))
    error = np.abs(predicted_NN[hidden] / world.links.rtt_ms_NN[hidden] - 1.0)
    assert np.median(error) < 0.3


def test_prediction_of_a_cloud_is_distance_and_heights() -> None:
    rng = np.random.default_rng(0)
    cloud = NetworkCoordinates(
        rng.normal(0, 50, (5, NUM_DIMENSIONS)), rng.uniform(1, 9, 5), np.ones(5)
    )
    predicted_NN = cloud.predict_ms_NN()
    for one in range(5):
        for other in range(one):
            distance_ms = math.dist(cloud.position_ms_NK[one], cloud.position_ms_NK[other])
            expected = distance_ms + cloud.height_ms_N[one] + cloud.height_ms_N[other]
            assert predicted_NN[one, other] == pytest.approx(expected)
    assert np.diag(predicted_NN).tolist() == [0.0] * 5


def test_unmeasured_nodes_stay_where_they_are() -> None:
    rtt_NN = np.array([[0.0, 50.0, np.nan], [50.0, 0.0, np.nan], [np.nan, np.nan, 0.0]])
    settled = fit_coordinates(rtt_NN, _start(3), np.random.default_rng(0))
    assert settled.position_ms_NK[2].tolist() == [0.0] * NUM_DIMENSIONS
    assert settled.predict_ms_NN()[0, 1] == pytest.approx(50.0, rel=0.05)
    nobody = fit_coordinates(np.full((2, 2), np.nan), _start(2), np.random.default_rng(0))
    assert nobody.predict_ms_NN()[0, 1] == 20.0
