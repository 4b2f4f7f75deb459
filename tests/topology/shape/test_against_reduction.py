"""H0, H1 and Betti numbers against a boundary matrix that shares no code with the package."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nesa_node.topology.shape.merge_tree import (
    Filtration,
    PersistenceDiagram,
    betti_numbers,
    make_filtration,
    merge_tree,
)
from nesa_node.topology.shape.network_shape import longest_loops, loop_diagram
from tests.topology.shape import reduction

Matrix = NDArray[np.float64]


def random_network(seed: int) -> tuple[Matrix, Matrix | None]:
    """5 to 13 nodes: points or any weights, ties or none, missing edges, births or none."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 14))
    if seed % 2:
        point_N2 = rng.random((count, 2))
        weight_NN = np.hypot(*(point_N2[:, None] - point_N2).transpose(2, 0, 1))
    else:
        weight_NN = rng.random((count, count))
    if seed % 3 == 0:
        weight_NN = np.ceil(weight_NN * 5)
    if seed % 5 == 0:
        weight_NN[rng.random((count, count)) < (0.3 if seed % 2 else 0.8)] = np.inf
    weight_NN = np.triu(weight_NN, 1)
    weight_NN = weight_NN + weight_NN.T
    births = rng.random(count) if seed % 4 < 2 else None
    if births is not None and seed % 3 == 0:
        births = np.floor(births * 4)
    return weight_NN, births


def as_bars(diagram: PersistenceDiagram) -> list[tuple[float, float]]:
    return sorted(diagram.barcode())


@pytest.mark.parametrize("seed", range(200))
def test_diagrams_and_betti_numbers_are_those_of_the_boundary_matrix(seed: int) -> None:
    weight_NN, birth_N = random_network(seed)
    filtration = make_filtration(weight_NN, birth_N)
    scale = reduction.flag_filtration(weight_NN, birth_N)
    expected = reduction.bars(scale)
    diagrams = merge_tree(filtration).diagram(), loop_diagram(filtration)
    assert as_bars(diagrams[0]) == expected[0]
    assert as_bars(diagrams[1]) == expected[1]
    for at in sorted(set(scale.values())):
        assert betti_numbers(diagrams, at) == reduction.betti_by_rank(scale, at)


def test_the_random_networks_have_loops_ties_births_and_holes() -> None:
    networks = [random_network(seed) for seed in range(200)]
    bars = [reduction.bars(reduction.flag_filtration(*network)) for network in networks]
    assert sum(bool(of[1]) for of in bars) > 100
    assert sum(math.inf in dict(of[1]).values() for of in bars) > 10
    assert sum(sum(math.isinf(death) for _, death in of[0]) > 1 for of in bars) >= 1
    assert sum(any(birth > 0 for birth, _ in of[0]) for of in bars) > 50


@pytest.mark.parametrize("seed", range(0, 200, 3))
def test_a_loops_cycle_is_born_with_it_and_bounds_when_it_dies(seed: int) -> None:
    weight_NN, birth_N = random_network(seed)
    filtration = make_filtration(weight_NN, birth_N)
    scale = reduction.flag_filtration(weight_NN, birth_N)
    loops = longest_loops(filtration, max_loops=100)
    expected = reduction.bars(scale)[1]
    assert sorted((loop.birth, loop.death) for loop in loops) == expected
    for loop in loops:
        assert not boundary_of(loop.edges)
        assert max(filtration.weight_NN[edge] for edge in loop.edges) == loop.birth
        if math.isfinite(loop.death):
            assert is_filled(scale, loop.edges, loop.death, strictly=False)
        assert not is_filled(scale, loop.edges, loop.death, strictly=True)


def boundary_of(edges: tuple[tuple[int, int], ...]) -> set[int]:
    odd: set[int] = set()
    for edge in edges:
        odd ^= set(edge)
    return odd


def is_filled(
    scale: dict[tuple[int, ...], float], cycle: Any, at: float, *, strictly: bool
) -> bool:
    """Whether `cycle` is a sum of boundaries of triangles up to (or before) `at`."""
    edges = [simplex for simplex in scale if len(simplex) == 2]
    place = {edge: position for position, edge in enumerate(edges)}
    triangles = [
        simplex
        for simplex, value in scale.items()
        if len(simplex) == 3 and (value < at if strictly else value <= at)
    ]
    columns = reduction.boundary(triangles, edges)
    return reduction.rank([*columns, {place[edge] for edge in cycle}]) == reduction.rank(columns)


def test_an_edge_waits_for_its_ends() -> None:
    filtration = make_filtration(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([0.0, 3.0]))
    assert filtration.weight_NN[0, 1] == 3.0
    # Born with the edge that connects it, the second node never shows.
    assert merge_tree(filtration).diagram().barcode() == ((0.0, math.inf),)


def test_restricted_filtration_keeps_order() -> None:
    weight_NN, birth_N = random_network(1)
    part = make_filtration(weight_NN, birth_N).restrict([3, 0])
    assert isinstance(part, Filtration)
    assert part.weight_NN[0, 1] == make_filtration(weight_NN, birth_N).weight_NN[3, 0]
