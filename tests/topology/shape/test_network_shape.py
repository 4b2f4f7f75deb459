import math

import numpy as np
import pytest
from numpy.typing import NDArray

from nesa_node.topology.shape.merge_tree import make_diagram, make_filtration
from nesa_node.topology.shape.network_shape import (
    _STATISTICS,
    BETTI_SCALES,
    compute_features,
    compute_shape,
)


def points(count: int, seed: int) -> NDArray[np.float64]:
    point_N2 = np.random.default_rng(seed).random((count, 2))
    distance_NN: NDArray[np.float64] = np.hypot(*(point_N2[:, None] - point_N2).transpose(2, 0, 1))
    return np.maximum(distance_NN, distance_NN.T)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 60, 600])
def test_features_have_one_length_and_are_finite(count: int) -> None:
    features = compute_features(compute_shape(make_filtration(points(count, 0)), num_landmarks=50))
    names = [f"{h}.{name}" for h in ("h0", "h1") for name in _STATISTICS]
    names += [f"{h}.betti@{scale}" for h in ("h0", "h1") for scale in BETTI_SCALES]
    assert list(features) == ["nodes", "unit", "parts", *names]
    assert all(math.isfinite(value) for value in features.values())
    assert features["nodes"] == count


def test_features_do_not_depend_on_the_nodes_order_nor_on_the_unit() -> None:
    distance_NN = points(60, 1)
    order = np.random.default_rng(2).permutation(60)
    first = compute_features(compute_shape(make_filtration(distance_NN)))
    second = compute_features(compute_shape(make_filtration(8 * distance_NN[np.ix_(order, order)])))
    assert second.pop("unit") == pytest.approx(8 * first.pop("unit"))
    assert second == pytest.approx(first, abs=1e-9)


def test_unreachable_parts_are_counted_and_everything_stays_finite() -> None:
    distance_NN = points(20, 3)
    distance_NN[:8, 8:] = distance_NN[8:, :8] = np.inf
    features = compute_features(compute_shape(make_filtration(distance_NN)))
    assert features["parts"] == 2
    assert all(math.isfinite(value) for value in features.values())


def test_betti_numbers_count_both_ends_as_a_complex_does() -> None:
    diagram = make_diagram(1, np.array([1.0, 2.0]), np.array([2.0, np.inf]))
    assert [diagram.betti(scale) for scale in (0.9, 1.0, 2.0, 9.0)] == [0, 1, 1, 1]
    assert diagram.num_essential == 1


def test_barcode_begins_with_the_longest_and_leaves_out_what_never_lived() -> None:
    diagram = make_diagram(0, np.array([0.0, 1.0, 0.0]), np.array([1.0, 1.0, np.inf]))
    assert diagram.barcode() == ((0.0, math.inf), (0.0, 1.0))
    assert diagram.barcode(1) == ((0.0, math.inf),)
