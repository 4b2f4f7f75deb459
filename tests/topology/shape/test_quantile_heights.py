"""Quantile heights against minimax paths, found by relaxation."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from nesa_node.topology.shape.merge_tree import make_filtration, merge_tree, quantile_heights


def minimax(weight_NN: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, N]: the smallest largest weight on any path between two nodes (Floyd and Warshall)."""
    height_NN = weight_NN.copy()
    for via in range(len(height_NN)):
        np.minimum(
            height_NN, np.maximum(height_NN[:, via, None], height_NN[None, via]), out=height_NN
        )
    return height_NN


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_quantile_height_connects_a_node_with_that_share_of_the_others(
    seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 12))
    weight_NN = np.triu(rng.random((count, count)), 1)
    weight_NN += weight_NN.T
    height_NN = minimax(weight_NN)
    wanted = math.ceil(share * (count - 1))
    expected_N = [sorted(np.delete(height_NN[node], node))[wanted - 1] for node in range(count)]
    tree = merge_tree(make_filtration(weight_NN, None))
    assert quantile_heights(tree, share) == pytest.approx(expected_N)
