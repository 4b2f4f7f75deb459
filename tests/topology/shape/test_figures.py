"""Figures 3 and 4 of the paper."""

import itertools
import math

import numpy as np
import pytest

from nesa_node.topology.shape.merge_tree import make_filtration
from nesa_node.topology.shape.network_shape import compute_shape, longest_loops
from tests.topology.shape import reduction
from tests.topology.shape.reduction import Simplex

EDGE = math.sqrt(3.0)  # of an equilateral triangle whose corners are 1 from its centre


def hollow(edges: list[tuple[int, int]], nodes: int) -> dict[Simplex, float]:
    """A complex without triangles, all there at once."""
    complex_: dict[Simplex, float] = {(node,): 0.0 for node in range(nodes)}
    return complex_ | dict.fromkeys(edges, 0.0)


def test_figure_3_the_two_complexes_have_the_same_homology() -> None:
    """A hollow triangle, and one with a side split in two: one part and one hole each."""
    triangle = hollow([(0, 1), (1, 2), (0, 2)], nodes=3)
    square = hollow([(0, 1), (1, 2), (2, 3), (0, 3)], nodes=4)
    assert reduction.betti_by_rank(triangle, 0.0) == reduction.betti_by_rank(square, 0.0) == (1, 1)


def test_figure_3_the_sum_of_edges_has_no_boundary() -> None:
    """Eq. 16, over Z/2, where signs do not matter."""
    boundaries = reduction.boundary([(0, 1), (1, 2), (0, 2)], [(0,), (1,), (2,)])
    assert not boundaries[0] ^ boundaries[1] ^ boundaries[2]


def test_figure_3_persistence_tells_the_two_apart() -> None:
    """As networks: three equal links are filled at once, a square's hole lasts to its diagonal."""
    triangle = compute_shape(make_filtration(1.0 - np.eye(3)))
    square_NN = np.array(
        [[abs(a - b) % 2 + 2.0 * (abs(a - b) == 2) for a in range(4)] for b in range(4)]
    )
    square = compute_shape(make_filtration(square_NN))
    assert triangle.betti(1.0) == (1, 0)
    assert square.betti(1.0) == (1, 1)
    assert square.h1.barcode() == ((1.0, 2.0),)
    assert square.loops[0].nodes == (0, 1, 2, 3)


def cech_filtration() -> dict[Simplex, float]:
    """Figure 4: circles round the corners of an equilateral triangle, by their radius.

    Simplices are born when their circles share a point: two at half the edge, three at the
    circumradius, which a Cech complex knows and a Rips complex does not.
    """
    scale: dict[Simplex, float] = {(corner,): 0.0 for corner in range(3)}
    scale |= dict.fromkeys(itertools.combinations(range(3), 2), EDGE / 2)
    return scale | {(0, 1, 2): 1.0}


@pytest.mark.parametrize(
    ("radius", "betti"),
    [(0.5, (3, 0)), (0.9, (1, 1)), (1.1, (1, 0))],
    ids=["left", "middle", "right"],
)
def test_figure_4_three_circles_grow(radius: float, betti: tuple[int, int]) -> None:
    assert reduction.betti_by_rank(cech_filtration(), radius) == betti


def test_figure_4_persistence_diagrams() -> None:
    bars = reduction.bars(cech_filtration())
    assert bars[0] == [(0.0, EDGE / 2), (0.0, EDGE / 2), (0.0, math.inf)]
    assert bars[1] == [(EDGE / 2, 1.0)]


def test_figure_4_has_no_hole_in_a_rips_filtration() -> None:
    """What the package computes: the triangle is there as soon as its three edges are."""
    shape = compute_shape(make_filtration(EDGE * (1.0 - np.eye(3))))
    assert shape.h0.barcode() == ((0.0, math.inf), (0.0, EDGE), (0.0, EDGE))
    assert len(shape.h1) == 0
    assert [shape.betti(2 * radius) for radius in (0.5, 0.9, 1.1)] == [(3, 0), (1, 0), (1, 0)]


def test_four_circles_have_a_hole_in_both() -> None:
    """So that the last test's emptiness is the triangle's, not the computation's."""
    corner_42 = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=np.float64)
    distance_44 = np.hypot(*(corner_42[:, None] - corner_42).transpose(2, 0, 1))
    filtration = make_filtration(distance_44)
    np.testing.assert_allclose(compute_shape(filtration).h1.barcode(), [[math.sqrt(2), 2.0]])
    assert longest_loops(filtration)[0].nodes == (0, 1, 2, 3)
