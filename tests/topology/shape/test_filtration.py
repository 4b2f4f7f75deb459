import numpy as np
import pytest
from numpy.typing import NDArray

from nesa_node.topology.shape.merge_tree import (
    geographic_filtration,
    make_filtration,
    network_filtration,
)
from nesa_node.topology.shape.network_shape import compute_shape

INF = np.inf


def symmetric(count: int, seed: int = 0) -> NDArray[np.float64]:
    upper = np.triu(np.random.default_rng(seed).random((count, count)) + 0.01, 1)
    return upper + upper.T


def test_network_edge_weighs_latency_and_both_ends_compute() -> None:
    round_trip_s = np.array([[0.0, 0.1], [0.1, 0.0]])
    seen = network_filtration(round_trip_s, compute_s_N=np.array([0.01, 0.03]))
    assert seen.weight_NN[0, 1] == pytest.approx(0.05 + 0.04)
    assert seen.birth_N.tolist() == [0.01, 0.03]
    assert np.diagonal(seen.weight_NN).tolist() == [0.0, 0.0]


def test_network_weights_are_exactly_symmetric_and_no_edge_is_older_than_its_ends() -> None:
    compute_s = np.random.default_rng(1).random(50)
    seen = network_filtration(symmetric(50), compute_s_N=compute_s)
    assert np.array_equal(seen.weight_NN, seen.weight_NN.T)
    off_diagonal = ~np.eye(50, dtype=bool)
    assert (seen.weight_NN >= np.maximum.outer(compute_s, compute_s))[off_diagonal].all()


def test_no_round_trip_is_no_edge() -> None:
    unlinked = np.full((3, 3), INF)
    np.fill_diagonal(unlinked, 0.0)
    seen = network_filtration(unlinked)
    assert np.isinf(seen.weight_NN[0, 1:]).all()
    assert seen.largest_weight() == 0.0
    assert seen.median_weight() == 0.0
    assert compute_shape(network_filtration(np.full((6, 6), INF))).betti(1.0) == (6, 0)


def test_arguments_stay_as_they_were() -> None:
    round_trip_s, births = symmetric(4), np.full(4, 5.0)
    before = round_trip_s.copy()
    network_filtration(round_trip_s, compute_s_N=births)
    filtration = make_filtration(round_trip_s, births)
    assert np.array_equal(round_trip_s, before)
    assert round_trip_s.flags.writeable
    assert not filtration.weight_NN.flags.writeable


def test_great_circle_distances_of_known_places() -> None:
    """Paris, New York, Sydney: 5,837 km, 16,960 km, 15,988 km."""
    seen = geographic_filtration(
        np.array([48.8566, 40.7128, -33.8688]), np.array([2.3522, -74.006, 151.2093])
    )
    assert seen.weight_NN[0, 1] == pytest.approx(5837, rel=1e-3)
    assert seen.weight_NN[0, 2] == pytest.approx(16960, rel=1e-3)
    assert seen.weight_NN[1, 2] == pytest.approx(15988, rel=1e-3)


def test_antipodes_and_the_date_line() -> None:
    seen = geographic_filtration(np.array([0.0, 0.0, 0.0]), np.array([0.0, 180.0, -179.0]))
    assert seen.weight_NN[0, 1] == pytest.approx(20015, rel=1e-3)
    assert seen.weight_NN[1, 2] == pytest.approx(111.2, rel=1e-3)


@pytest.mark.parametrize(
    ("weights", "births", "said"),
    [
        (np.zeros((2, 3)), None, "square"),
        (np.array([[0.0, 1.0], [2.0, 0.0]]), None, "direction"),
        (np.array([[0.0, np.nan], [np.nan, 0.0]]), None, "NaN"),
        (np.array([[0.0, -1.0], [-1.0, 0.0]]), None, "negative"),
        (np.array([[1.0, 1.0], [1.0, 0.0]]), None, "itself"),
        (np.zeros((2, 2)), np.zeros(3), "births"),
        (np.zeros((2, 2)), np.array([0.0, INF]), "births"),
    ],
)
def test_matrices_that_are_no_filtration_are_refused(
    weights: NDArray[np.float64], births: NDArray[np.float64] | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_filtration(weights, births)


@pytest.mark.parametrize("longitude", [181.0, np.nan])
def test_places_off_the_globe_are_refused(longitude: float) -> None:
    with pytest.raises(ValueError, match="places"):
        geographic_filtration(np.array([0.0]), np.array([longitude]))


def test_large_matrices_are_checked_and_raised_row_by_row() -> None:
    """600 rows are three blocks."""
    weight_NN, birth_N = symmetric(600), np.random.default_rng(2).random(600) * 2
    seen = make_filtration(weight_NN, birth_N)
    expected = np.maximum(weight_NN, np.maximum.outer(birth_N, birth_N))
    np.fill_diagonal(expected, 0.0)
    assert np.array_equal(seen.weight_NN, expected)
    weight_NN[599, 1] += 1.0
    with pytest.raises(ValueError, match="direction"):
        make_filtration(weight_NN)
