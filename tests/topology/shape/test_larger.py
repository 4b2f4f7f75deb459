"""gudhi and ripser on networks too large for the boundary matrix of the tests."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cophenet, linkage
from scipy.spatial.distance import squareform

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.shape import gudhi_backend as backend
from nesa_node.topology.shape.merge_tree import (
    Filtration,
    MergeTree,
    geographic_filtration,
    leaf_heights,
    make_filtration,
    mean_difference,
    merge_tree,
    quantile_heights,
)
from nesa_node.topology.shape.network_shape import (
    choose_landmarks,
    compute_shape,
    longest_loops,
    loop_diagram,
)

# ripser computes in float32: a value is rounded by at most 2^-24 of itself, and a lifetime that is
# shorter than that may vanish.
RIPSER_TOLERANCE = 2.0**-23


def round_trips(count: int, seed: int) -> Filtration:
    """Four regions, links that know no triangle inequality."""
    rng = np.random.default_rng(seed)
    centre_42 = rng.random((4, 2)) * 0.2
    point_N2 = centre_42[rng.integers(0, 4, count)] + rng.normal(0.0, 0.01, (count, 2))
    seconds_NN = np.hypot(*(point_N2[:, None] - point_N2).transpose(2, 0, 1))
    seconds_NN = np.triu(seconds_NN * rng.lognormal(0.0, 0.2, (count, count)), 1)
    return make_filtration(seconds_NN + seconds_NN.T)


def cophenetic_matrix(tree: MergeTree) -> Floats:
    """Heights [N, N] in the nodes' order; inf between unconnected parts."""
    matrix_NN = np.empty((len(tree), len(tree)))
    for leaf, node in enumerate(tree.order_N.tolist()):
        matrix_NN[node, tree.order_N] = leaf_heights(tree, leaf)
    return matrix_NN


def components(tree: MergeTree, scale: float) -> Ints:
    """Component number of each node at `scale`, [N]; -1 for unborn nodes."""
    label_N = np.empty(len(tree), dtype=np.int64)
    label_N[tree.order_N] = np.cumsum(tree.gap_N > scale) - 1
    born_N = tree.birth_N <= scale
    label_N[born_N] = np.unique(label_N[born_N], return_inverse=True)[1]
    label_N[~born_N] = -1
    return label_N


def lasting(points: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Sorted, without what ripser's rounding may lose."""
    kept = points[points[:, 1] - points[:, 0] > least]
    return kept[np.lexsort((kept[:, 1], kept[:, 0]))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("count", "seed"), [(60, 0), (150, 1), (300, 2)])
def test_ripser_finds_the_same_within_float32(count: int, seed: int) -> None:
    from ripser import ripser

    filtration = round_trips(count, seed)
    theirs = ripser(filtration.weight_NN, distance_matrix=True, maxdim=1)["dgms"]
    least = 2 * RIPSER_TOLERANCE * filtration.largest_weight()
    for ours, points in zip(
        (merge_tree(filtration).diagram(), loop_diagram(filtration)), theirs, strict=True
    ):
        expected = lasting(np.asarray(points, dtype=np.float64), least)
        found = lasting(np.stack([ours.birth_P, ours.death_P], axis=1), least)
        assert len(found) == len(expected) > 5
        np.testing.assert_allclose(found, expected, rtol=RIPSER_TOLERANCE)


@pytest.mark.parametrize("threshold", [0.05, 0.1, np.inf])
def test_loops_have_the_bars_of_the_diagram(threshold: float) -> None:
    """Two ways through gudhi: its ripser, and a simplex tree after edges were collapsed."""
    filtration = round_trips(120, seed=3)
    diagram = loop_diagram(filtration, threshold=threshold)
    loops = longest_loops(filtration, max_loops=len(diagram) + 5, threshold=threshold)
    assert sorted((loop.birth, loop.death) for loop in loops) == sorted(diagram.barcode())
    for loop in loops:
        assert max(filtration.weight_NN[edge] for edge in loop.edges) == loop.birth


def test_cophenetic_matrix_is_that_of_scipys_single_linkage() -> None:
    filtration = round_trips(200, seed=4)
    expected = squareform(cophenet(linkage(squareform(filtration.weight_NN), "single")))
    tree = merge_tree(filtration)
    np.testing.assert_array_equal(cophenetic_matrix(tree), expected)
    np.testing.assert_array_equal(leaf_heights(tree, 7), expected[tree.order_N[7], tree.order_N])
    off_diagonal = ~np.eye(200, dtype=bool)
    medians = [np.median(row[mask]) for row, mask in zip(expected, off_diagonal, strict=True)]
    np.testing.assert_allclose(quantile_heights(tree), medians)
    nearest = (expected + np.diag(np.full(200, np.inf))).min(axis=1)
    np.testing.assert_array_equal(quantile_heights(tree, 0.0), nearest)


def test_mean_difference_is_that_of_the_matrices() -> None:
    past = [merge_tree(round_trips(80, seed)) for seed in (5, 6, 7)]
    now = merge_tree(round_trips(90, seed=8))
    rng = np.random.default_rng(0)
    node_KC = np.stack([rng.permutation(80)[:50] for _ in past])
    node_C = rng.permutation(90)[:50]
    matrices = [
        cophenetic_matrix(tree)[np.ix_(nodes, nodes)]
        for tree, nodes in zip([*past, now], [*node_KC, node_C], strict=True)
    ]
    away = np.abs(matrices[-1] - np.median(matrices[:-1], axis=0))
    expected = away[~np.eye(50, dtype=bool)].mean()
    assert mean_difference(past, node_KC, now, node_C) == pytest.approx(expected)
    assert mean_difference([now], np.arange(90)[None], now, np.arange(90)) == 0.0
    assert mean_difference(past, node_KC[:, :1], now, node_C[:1]) == 0.0


def test_unreachable_parts_count_as_the_cap() -> None:
    weight_NN = np.array([[0, 1, np.inf], [1, 0, np.inf], [np.inf, np.inf, 0]])
    tree = merge_tree(make_filtration(weight_NN))
    whole = merge_tree(make_filtration(np.where(np.isinf(weight_NN), 2.0, weight_NN)))
    nodes = np.arange(3)
    assert mean_difference([tree], nodes[None], whole, nodes, cap=10.0) == pytest.approx(4 * 8 / 6)
    assert quantile_heights(tree, cap=10.0).tolist() == [1.0, 1.0, 10.0]


def test_components_at_a_scale_are_those_of_the_graph() -> None:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    filtration = round_trips(100, seed=7)
    born = np.linspace(0.0, 0.02, 100)
    filtration = make_filtration(filtration.weight_NN, born)
    tree = merge_tree(filtration)
    for scale in (0.005, 0.01, 0.05):
        alive = born <= scale
        graph = (filtration.weight_NN <= scale) & alive & alive[:, None]
        expected = connected_components(csr_array(graph[np.ix_(alive, alive)].astype(np.float64)))[
            1
        ]
        found = components(tree, scale)
        assert (found[~alive] == -1).all()
        pairs = set(zip(found[alive].tolist(), expected.tolist(), strict=True))
        assert len(pairs) == len(set(expected.tolist())) == found.max() + 1


def test_landmarks_cover_what_they_say() -> None:
    filtration = round_trips(300, seed=8)
    chosen = choose_landmarks(filtration, 40)
    nearest = filtration.weight_NN[chosen.node_K].min(axis=0)
    assert chosen.cover_radius == nearest.max()
    assert len(set(chosen.node_K.tolist())) == 40
    assert choose_landmarks(filtration, 400).cover_radius == 0.0
    assert choose_landmarks(filtration, 10).cover_radius >= chosen.cover_radius


def test_every_unreachable_part_gets_a_landmark() -> None:
    weight_NN = np.full((9, 9), np.inf)
    for start in (0, 3, 6):
        weight_NN[start : start + 3, start : start + 3] = 1.0
    np.fill_diagonal(weight_NN, 0.0)
    chosen = choose_landmarks(make_filtration(weight_NN), 3)
    assert {node // 3 for node in chosen.node_K.tolist()} == {0, 1, 2}


def ring(count: int) -> Filtration:
    angle_N = np.arange(count) * 2 * np.pi / count
    chord_NN = 2 * np.abs(np.sin((angle_N[:, None] - angle_N) / 2))
    return make_filtration((chord_NN + chord_NN.T) / 2)


def test_landmarks_of_a_ring_show_its_hole() -> None:
    shape = compute_shape(ring(120), max_exact_nodes=100, num_landmarks=30)
    exact = compute_shape(ring(120), max_exact_nodes=500)
    assert len(shape.h1) == len(exact.h1) == 1
    bars = np.array([shape.h1.barcode()[0], exact.h1.barcode()[0]])
    assert np.abs(bars[0] - bars[1]).max() <= 2 * shape.landmarks.cover_radius
    # Nodes are those of the whole ring, and the cycle goes all the way round.
    nodes = shape.loops[0].nodes
    assert set(nodes) <= set(shape.landmarks.node_K.tolist())
    assert max(b - a for a, b in itertools.pairwise(nodes)) <= 120 // 3


def places(count: int, seed: int) -> Filtration:
    rng = np.random.default_rng(seed)
    return geographic_filtration(rng.uniform(-90, 90, count), rng.uniform(-180, 180, count))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many simplices each complex had whose pairs were read."""
    tree, found = backend.load_gudhi().SimplexTree, list[int]()
    pairs = tree.persistence_pairs

    def counted(self: Any) -> Any:
        found.append(self.num_simplices())
        return pairs(self)

    monkeypatch.setattr(tree, "persistence_pairs", counted)
    return found


def test_random_places_are_read_until_their_last_ring_closes(listed: list[int]) -> None:
    shape = compute_shape(places(200, 1))
    assert len(shape.loops) == 5
    assert (shape.loop_nodes, len(listed)) == (200, 1)
    assert listed[0] < 2_000, "up to the longest edge there are more than a million"
    assert [(loop.birth, loop.death) for loop in shape.loops] == list(shape.h1.barcode(5))


def test_two_hundred_nodes_on_a_circle_have_their_ring(listed: list[int]) -> None:
    shape = compute_shape(ring(200))
    (loop,) = shape.loops
    assert [(loop.birth, loop.death)] == list(shape.h1.barcode())
    assert len(loop.nodes) > 100
    assert listed[0] < 5_000


def test_too_many_triangles_take_fewer_landmarks_which_is_told(
    monkeypatch: pytest.MonkeyPatch, listed: list[int]
) -> None:
    monkeypatch.setattr(backend, "MAX_TRIANGLES", 2_000)
    rng = np.random.default_rng(3)
    weight_NN = np.triu(rng.random((100, 100)), 1)
    filtration = make_filtration(weight_NN + weight_NN.T)
    with pytest.raises(backend.TooManyTrianglesError):
        longest_loops(filtration)
    assert listed == []
    shape = compute_shape(filtration)
    assert (shape.loop_nodes, len(shape.landmarks.node_K)) == (50, 100)
    assert shape.loops
    assert listed[-1] <= 2_000 + 50 * 49 // 2 + 50


def test_the_bound_leaves_room_for_any_hundred_nodes() -> None:
    assert math.comb(100, 3) <= backend.MAX_TRIANGLES
