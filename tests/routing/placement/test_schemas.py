from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nesa_node.routing.placement.placement_problem import PlacementProblem
from nesa_node.routing.placement.recipes import RECIPES, Recipe, apply_recipe, cluster_nodes
from nesa_node.routing.placement.schemas import (
    CANDIDATE_SCHEMAS,
    SchemaLibrary,
    choose_schema,
    learn_library,
    placement_features,
    plain_features,
    replace_infinite_costs,
    schema_cost,
    schema_costs,
    select_schemas,
    shape_features,
)
from nesa_node.routing.placement.score import score_assignment
from tests.routing.placement.rooms import random_room

FEW: tuple[Recipe, ...] = CANDIDATE_SCHEMAS[::6]


def _rooms(count: int, *, seed: int = 0) -> list[PlacementProblem]:
    rng = np.random.default_rng(seed)
    return [random_room(rng, int(rng.integers(8, 16)), 12, most=8) for _ in range(count)]


def _library(rooms: list[PlacementProblem], *, shape: bool) -> SchemaLibrary:
    features = [placement_features(room, with_homology=shape) for room in rooms]
    costs = schema_costs(rooms, FEW, "latency")
    return learn_library(costs, features, FEW, np.random.default_rng(0), num_blocks=12)


def test_every_schema_keeps_to_memory() -> None:
    for room in _rooms(5):
        for recipe in (*CANDIDATE_SCHEMAS, *RECIPES):
            layout = apply_recipe(room, recipe)
            assert (layout.ends_N - layout.starts_N == room.max_blocks_N).all()
            assert layout.starts_N.min() >= 0
            assert layout.ends_N.max() <= room.problem.num_blocks


def test_a_schema_gives_the_same_layout_again() -> None:
    (room,) = _rooms(1)
    for recipe in CANDIDATE_SCHEMAS:
        first, second = apply_recipe(room, recipe), apply_recipe(room, recipe)
        assert (first.starts_N == second.starts_N).all()


@pytest.mark.parametrize("shape", [False, True])
def test_a_library_chooses_a_schema_that_it_has(shape: bool) -> None:
    rooms = _rooms(24)
    library = _library(rooms, shape=shape)
    for room in _rooms(4, seed=9):
        choice = choose_schema(library, room)
        assert choice.schema in library.schemas
        assert 1 <= len(choice.tried) <= 3
        least = min(tried.cost for tried in choice.tried)
        assert schema_cost(room, choice.score, "latency") == least
        assert schema_cost(room, score_assignment(room, choice.layout), "latency") == pytest.approx(
            least
        )
    assert any(name.startswith("h0.") for name in library.features) == shape


def test_costs_that_follow_a_feature_are_learnt() -> None:
    """Two schemas of which one is good where "x" is high, the other where it is low."""
    rng = np.random.default_rng(0)
    x_W = rng.normal(size=60)
    costs = np.exp(np.stack([x_W, -x_W], axis=1))
    features = [{"x": float(x), "noise": float(rng.normal())} for x in x_W]
    library = learn_library(costs, features, FEW[:2], rng, num_blocks=12)
    for x in (-1.0, 1.0):
        expected = library.expected_log_costs({"x": x, "noise": 0.0})
        assert int(expected.argmin()) == int(x > 0)


def test_kinds_that_lie_apart_are_told_apart() -> None:
    rng = np.random.default_rng(1)
    features = [
        {"x": 5.0 * (number % 2) + 0.1 * float(rng.normal()), "y": float(rng.normal() * 0.1)}
        for number in range(40)
    ]
    costs = np.array([[1.0, 2.0] if number % 2 else [2.0, 1.0] for number in range(40)])
    library = learn_library(costs, features, FEW[:2], rng, num_blocks=12, max_clusters=2)
    assert len(library.clusters) == 2
    near, far = (library.nearest_cluster({"x": x, "y": 0.0}) for x in (0.0, 5.0))
    assert library.clusters[near].schemas == (1,)
    assert library.clusters[far].schemas == (0,)


def test_a_cover_takes_no_more_schemas_than_help() -> None:
    costs = np.array([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]])
    assert set(select_schemas(costs, 3)) == {0, 1}
    assert len(select_schemas(costs, 1)) == 1


def test_features_are_finite_and_do_not_depend_on_units() -> None:
    (room,) = _rooms(1, seed=4)
    plain, shape = plain_features(room), shape_features(room)
    assert np.isfinite([*plain.values(), *shape.values()]).all()
    assert plain.keys().isdisjoint(shape)
    slower = {
        name: getattr(room.problem, name) * 10.0
        for name in ("block_s_N", "visit_s_N", "entry_s_N", "exit_s_N", "transfer_s_NN")
    }
    ten_times = PlacementProblem(replace(room.problem, **slower), room.max_blocks_N)
    assert plain_features(ten_times) == pytest.approx(plain)
    lonely = random_room(np.random.default_rng(0), 1, 4)
    assert np.isfinite(list(placement_features(lonely, with_homology=True).values())).all()


def test_holes_cost_more_than_anything_else() -> None:
    costs = replace_infinite_costs(np.array([[1.0, np.inf], [np.inf, np.inf]]))
    assert costs.tolist() == [[1.0, 10.0], [10.0, 10.0]]


def test_near_nodes_are_grouped() -> None:
    room = random_room(np.random.default_rng(2), 30, 12)
    group_N = cluster_nodes(room, np.arange(30), 4)
    assert len(np.unique(group_N)) <= 4
    transfer_s_NN = room.problem.transfer_s_NN
    same = group_N[:, None] == group_N
    np.fill_diagonal(same, False)
    assert transfer_s_NN[same].mean() < transfer_s_NN[~same].mean()
