from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from nesa_node.core.arrays import Floats, Ints
from nesa_node.routing.placement.pipeline import even_cuts, quickest_cuts

Cost = Callable[[Floats], float]


def _least(most_P: Ints, block_s_P: Floats, blocks: int, cost: Cost) -> float:
    ranges = [range(1, most + 1) for most in most_P]
    every = (np.array(lengths) for lengths in itertools.product(*ranges))
    return min(cost(lengths * block_s_P) for lengths in every if lengths.sum() == blocks)


@pytest.mark.parametrize(("cut", "cost"), [(quickest_cuts, np.sum), (even_cuts, np.max)])
def test_cuts_are_as_good_as_the_best_of_all(
    cut: Callable[[Ints, Floats, int], Ints], cost: Cost
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        most_P, block_s_P = rng.integers(1, 5, 4), rng.random(4) + 0.01
        blocks = int(rng.integers(4, most_P.sum() + 1))
        lengths_P = cut(most_P, block_s_P, blocks)
        assert lengths_P.sum() == blocks
        assert (lengths_P >= 1).all()
        assert (lengths_P <= most_P).all()
        best = _least(most_P, block_s_P, blocks, cost)
        assert cost(lengths_P * block_s_P) == pytest.approx(best)


def test_even_cuts_are_in_proportion_to_speed() -> None:
    cuts = even_cuts(np.array([80, 80, 80]), np.array([1.0, 2.0, 4.0]), 70)
    assert cuts.tolist() == [40, 20, 10]


@pytest.mark.parametrize("cut", [quickest_cuts, even_cuts])
@pytest.mark.parametrize(("most", "blocks"), [([2, 2], 5), ([2, 2], 1), ([0, 9], 4), ([], 1)])
def test_what_does_not_fit_is_refused(
    cut: Callable[[Ints, Floats, int], Ints], most: list[int], blocks: int
) -> None:
    most_P = np.array(most, dtype=np.int64)
    with pytest.raises(ValueError, match="do not fit"):
        cut(most_P, np.ones(len(most)), blocks)
