"""Precomputed schemas: the choice of a placement recipe by topology, without search (paper, 2.7).

A schema is a `Recipe` without search, so that it applies to any swarm of its kind. A library is
learnt from stored snapshots of one model: they are clustered into kinds of topology, each kind
keeps the schemas that served its snapshots best, and for every schema a linear regression predicts
the logarithm of its cost from a snapshot's features. The paper feeds homology into "a dedicated
classifier"; predicting the best class directly was no better than the best single schema, while
predicting costs and measuring the three lowest is.

F features, S schemas, W snapshots, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import require_node
from nesa_node.routing.placement.placement_problem import Assignment, PlacementProblem
from nesa_node.routing.placement.recipes import FillOrder, Recipe, apply_recipe
from nesa_node.routing.placement.score import Goal, PlacementScore, score_assignment
from nesa_node.topology.shape.merge_tree import make_filtration
from nesa_node.topology.shape.network_shape import compute_features, compute_shape

_QUANTILES = (0.1, 0.5, 0.9)
_EPSILON = 1e-9


def plain_features(instance: PlacementProblem) -> dict[str, float]:
    """Features of sizes, speeds, memory and transfer times, partly as quantiles.

    Times are relative to the whole model's compute time on the median node, so that models and
    steps of different size are comparable.
    """
    problem = instance.problem
    blocks = problem.num_blocks
    most_N = np.maximum(instance.max_blocks_N, 0)
    block_s_N = problem.busy_block_s_N
    unit_s = max(float(np.median(block_s_N)) * blocks, _EPSILON)
    largest_first = np.cumsum(np.sort(most_N)[::-1])
    rate_N = np.sort(instance.blocks_per_s_N)[::-1]
    tenth = max(1, len(rate_N) // 10)
    away = ~np.eye(problem.num_nodes, dtype=bool)
    transfer_s = problem.transfer_s_NN[away] if problem.num_nodes > 1 else np.zeros(1)
    ends_s_CN = np.array([each.entry_s_N + each.exit_s_N for each in instance.client_problems])
    found = {
        "log_nodes": np.log(problem.num_nodes),
        "copies": most_N.sum() / blocks,
        "depth": float(np.searchsorted(largest_first, blocks) + 1),
        "alone": float((most_N >= blocks).mean()),
        "fast_share": rate_N[:tenth].sum() / max(rate_N.sum(), _EPSILON),
        "spread": float(np.std(np.log(block_s_N + _EPSILON))),
        "size_and_speed": _correlation(most_N.astype(np.float64), instance.blocks_per_s_N),
        "clients": float(len(instance.client_problems)),
        "clients_apart": float(np.median(ends_s_CN, axis=1).std() / unit_s),
    }
    for share in _QUANTILES:
        name = f"{share:.0%}"
        found[f"most@{name}"] = np.quantile(most_N, share) / blocks
        found[f"block@{name}"] = np.quantile(block_s_N, share) * blocks / unit_s
        found[f"transfer@{name}"] = np.log(np.quantile(transfer_s, share) / unit_s + _EPSILON)
        found[f"ends@{name}"] = np.log(np.quantile(ends_s_CN, share) / unit_s + _EPSILON)
    return {name: float(value) for name, value in found.items()}


def shape_features(instance: PlacementProblem) -> dict[str, float]:
    """Statistics of the persistent homology of the round trips.

    No persistence images (Adams et al., JMLR 18, 2017): they have more pixels than a library has
    snapshots.
    """
    both_ways_NN = instance.problem.transfer_s_NN + instance.problem.transfer_s_NN.T
    shape = compute_shape(make_filtration(both_ways_NN), max_loops=0)
    return compute_features(shape)


def _correlation(one_N: Floats, other_N: Floats) -> float:
    if len(one_N) < 2 or one_N.std() == 0 or other_N.std() == 0:
        return 0.0
    return float(np.corrcoef(one_N, other_N)[0, 1])


MAX_SCHEMAS_TRIED = 3
"""Schemas that are applied and measured per choice; the best of them is used."""
_HOLE_COST_FACTOR = 10.0
_RIDGE_ALPHAS = (3.0, 10.0, 30.0, 100.0, 300.0)

_ORDERS: tuple[FillOrder, ...] = ("memory", "speed")
_FILL_VARIANTS: tuple[tuple[FillOrder, int], ...] = (
    *((order, regions) for order in _ORDERS for regions in (1, 2, 4, 8)),
    ("near", 1),
)
CANDIDATE_SCHEMAS: tuple[Recipe, ...] = tuple(
    Recipe(
        name=f"{pipelines}-{order}-{regions}",
        pipelines=pipelines,
        searched=False,
        order=order,
        regions=regions,
    )
    for pipelines in (0, 1, 2, 4)
    for order, regions in _FILL_VARIANTS
)
"""Candidates for a library: heuristic pipelines, with orders and regions of filling."""


@dataclass(frozen=True, slots=True, eq=False)
class TopologyCluster:
    """A cluster of snapshots around `centroid_F` (scaled features) and its schemas.

    `schemas`: indices into the library's schemas, best first. `snapshots`: their number.
    """

    centroid_F: Floats
    schemas: tuple[int, ...]
    snapshots: int


@dataclass(frozen=True, slots=True, eq=False)
class SchemaLibrary:
    """Schemas for one model, with a regression of their costs.

    log cost = intercept_S + ((features - mean_F) / scale_F) @ slope_FS, relative to the mean of all
    schemas for the same snapshot.
    """

    num_blocks: int
    goal: Goal
    schemas: tuple[Recipe, ...]
    features: tuple[str, ...]
    mean_F: Floats
    scale_F: Floats
    slope_FS: Floats
    intercept_S: Floats
    clusters: tuple[TopologyCluster, ...]

    def nearest_cluster(self, features: dict[str, float]) -> int:
        """The index of the kind with the nearest centre."""
        scaled_F = self._scaled(features)
        away = [float(((kind.centroid_F - scaled_F) ** 2).sum()) for kind in self.clusters]
        return int(np.argmin(away))

    def expected_log_costs(self, features: dict[str, float]) -> Floats:
        """The predicted logarithm of each schema's cost, up to a constant, float64 [S]."""
        expected_S: Floats = self.intercept_S + self._scaled(features) @ self.slope_FS
        return expected_S

    def _scaled(self, features: dict[str, float]) -> Floats:
        value_F = np.array([features[name] for name in self.features])
        # Clipped, since the regression must not extrapolate to swarms unlike the training data.
        scaled_F: Floats = np.clip((value_F - self.mean_F) / self.scale_F, -3.0, 3.0)
        return scaled_F


@dataclass(frozen=True, slots=True)
class TriedSchema:
    """A schema and its measured cost."""

    schema: str
    cost: float


@dataclass(frozen=True, slots=True)
class SchemaChoice:
    """The best of the measured schemas."""

    cluster: int
    schema: Recipe
    layout: Assignment
    score: PlacementScore
    tried: tuple[TriedSchema, ...]


def placement_features(instance: PlacementProblem, *, with_homology: bool) -> dict[str, float]:
    """The features of `instance`, those of the homology only `with_homology`."""
    return plain_features(instance) | (shape_features(instance) if with_homology else {})


def choose_schema(
    library: SchemaLibrary, instance: PlacementProblem, *, max_tried: int = MAX_SCHEMAS_TRIED
) -> SchemaChoice:
    """Apply the `max_tried` schemas with the lowest predicted cost, and return the best."""
    features = placement_features(
        instance, with_homology=any(name.startswith("h0.") for name in library.features)
    )
    number = library.nearest_cluster(features)
    expected_S = library.expected_log_costs(features)
    ranked = sorted(library.clusters[number].schemas, key=lambda schema: float(expected_S[schema]))
    best: tuple[float, Recipe, Assignment, PlacementScore] | None = None
    tried = []
    for schema in ranked[: max(max_tried, 1)]:
        recipe = library.schemas[schema]
        layout = apply_recipe(instance, recipe)
        score = score_assignment(instance, layout)
        cost = schema_cost(instance, score, library.goal)
        tried.append(TriedSchema(recipe.name, cost))
        if best is None or cost < best[0]:
            best = (cost, recipe, layout, score)
    assert best is not None, "every kind has a schema"
    return SchemaChoice(number, best[1], best[2], best[3], tuple(tried))


def schema_cost(instance: PlacementProblem, score: PlacementScore, goal: Goal) -> float:
    """The cost to learn: the goal's cost, increased by the share of missing replicas."""
    wanted = instance.replicas * instance.problem.num_blocks
    return score.cost(goal) * (1.0 + score.deficit.replicas / wanted)


def schema_costs(
    instances: Sequence[PlacementProblem], schemas: Sequence[Recipe], goal: Goal
) -> Floats:
    """The cost [W, S] of every schema in every room; `_HOLE_COST_FACTOR` times the room's worst
    with holes."""
    cost_WS = np.array(
        [
            [
                schema_cost(room, score_assignment(room, apply_recipe(room, schema)), goal)
                for schema in schemas
            ]
            for room in instances
        ]
    )
    return replace_infinite_costs(cost_WS)


def replace_infinite_costs(cost_WS: Floats) -> Floats:
    """`cost_WS` with infinite costs replaced by `_HOLE_COST_FACTOR` times the row's largest finite
    one."""
    finite_WS = np.where(np.isfinite(cost_WS), cost_WS, np.nan)
    some_W1 = np.isfinite(finite_WS).any(axis=1, keepdims=True)
    worst_W1 = np.nanmax(np.where(some_W1, finite_WS, 1.0), axis=1, keepdims=True)
    filled: Floats = np.where(np.isfinite(cost_WS), cost_WS, _HOLE_COST_FACTOR * worst_W1)
    return filled


def learn_library(
    cost_WS: Floats,
    features_W: Sequence[dict[str, float]],
    schemas: Sequence[Recipe],
    rng: np.random.Generator,
    *,
    num_blocks: int,
    goal: Goal = "latency",
    max_clusters: int = 5,
    schemas_per_cluster: int = 12,
) -> SchemaLibrary:
    """A library learnt from the costs of every schema in stored snapshots and their features.

    Ridge regression, with the penalty chosen by leave-one-out cross-validation. A kind has at least
    five snapshots. Raises `ValueError` if the rows do not match the snapshots.
    """
    require_node("learning schemas", "sklearn")
    # Imported here: loading takes a second, and only learning needs it.
    from sklearn.linear_model import RidgeCV

    if len(features_W) != len(cost_WS) or not len(cost_WS):
        raise ValueError(f"{len(cost_WS)} rows of costs for {len(features_W)} snapshots")
    names = tuple(features_W[0])
    value_WF = np.array([[features[name] for name in names] for features in features_W])
    mean_F, scale_F = value_WF.mean(axis=0), value_WF.std(axis=0)
    scale_F = np.where(scale_F > 1e-9, scale_F, 1.0)
    scaled_WF = np.clip((value_WF - mean_F) / scale_F, -3.0, 3.0)
    log_WS = np.log(cost_WS)
    log_WS = log_WS - log_WS.mean(axis=1, keepdims=True)
    fitted = RidgeCV(alphas=_RIDGE_ALPHAS).fit(scaled_WF, log_WS)
    kind_W = _cluster(scaled_WF, max_clusters, rng)
    kinds = tuple(
        TopologyCluster(
            scaled_WF[kind_W == kind].mean(axis=0),
            select_schemas(cost_WS[kind_W == kind], schemas_per_cluster),
            int((kind_W == kind).sum()),
        )
        for kind in np.unique(kind_W)
    )
    return SchemaLibrary(
        num_blocks=num_blocks,
        goal=goal,
        schemas=tuple(schemas),
        features=names,
        mean_F=mean_F,
        scale_F=scale_F,
        slope_FS=np.asarray(fitted.coef_, dtype=np.float64).reshape(len(schemas), -1).T,
        intercept_S=np.asarray(fitted.intercept_, dtype=np.float64).reshape(-1),
        clusters=kinds,
    )


def select_schemas(cost_WS: Floats, max_schemas: int) -> tuple[int, ...]:
    """A greedy set of at most `max_schemas` schemas whose best member has the lowest mean cost
    ratio.
    """
    best_W1 = cost_WS.min(axis=1, keepdims=True)
    ratio_WS = cost_WS / best_W1
    chosen: list[int] = []
    so_far_W = np.full(len(cost_WS), np.inf)
    while len(chosen) < min(max_schemas, cost_WS.shape[1]):
        means_S = np.minimum(ratio_WS, so_far_W[:, None]).mean(axis=0)
        schema = int(means_S.argmin())
        if chosen and means_S[schema] >= so_far_W.mean() * (1 - 1e-6):
            break
        chosen.append(schema)
        so_far_W = np.minimum(so_far_W, ratio_WS[:, schema])
    return tuple(chosen)


def _cluster(scaled_WF: Floats, max_clusters: int, rng: np.random.Generator) -> Ints:
    """The kind of each snapshot, by k-means with the number of kinds of the best silhouette."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    best, best_W = 0.0, np.zeros(len(scaled_WF), dtype=np.int64)
    for count in range(2, min(max_clusters, len(scaled_WF) // 10) + 1):
        seed = int(rng.integers(1 << 31))
        found_W = KMeans(count, n_init=4, random_state=seed).fit_predict(scaled_WF)
        if np.bincount(found_W).min() < 5:
            continue
        separate = float(silhouette_score(scaled_WF, found_W))
        if separate > best:
            best, best_W = separate, found_W.astype(np.int64)
    return best_W
