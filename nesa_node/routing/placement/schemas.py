"""Precomputed schemas: the choice of a placement recipe by topology, without search (paper, 2.7).

A schema is a `Recipe` without search, so that it applies to any swarm of its kind. A library is
learnt from stored snapshots of one model: they are clustered into kinds of topology, each kind
keeps the schemas that served its snapshots best, and for every schema a linear regression predicts
the logarithm of its cost from a snapshot's features. The paper feeds homology into "a dedicated
classifier"; predicting the best class directly was no better than the best single schema, while
predicting costs and measuring the three lowest is.

F features, S schemas, W snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.extras import require_node
from nesa_node.routing.placement.features import plain_features, shape_features
from nesa_node.routing.placement.recipes import Order, Recipe, lay_out
from nesa_node.routing.placement.room import Layout, Room
from nesa_node.routing.placement.score import Goal, Score, measure
from nesa_node.routing.problem import Floats, Ints

TRIES = 3
"""Schemas that are applied and measured per choice; the best of them is used."""
_HOLE = 10.0
_STRICTNESS = (3.0, 10.0, 30.0, 100.0, 300.0)

_FILLS: tuple[tuple[Order, int], ...] = (
    ("memory", 1),
    ("memory", 2),
    ("memory", 4),
    ("memory", 8),
    ("speed", 1),
    ("speed", 2),
    ("speed", 4),
    ("speed", 8),
    ("near", 1),
)
SCHEMAS: tuple[Recipe, ...] = tuple(
    Recipe(
        name=f"{pipelines}-{order}-{regions}",
        pipelines=pipelines,
        searched=False,
        order=order,
        regions=regions,
    )
    for pipelines in (0, 1, 2, 4)
    for order, regions in _FILLS
)
"""Candidates for a library: heuristic pipelines, with orders and regions of filling."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A cluster of snapshots around `centre_F` (scaled features) and its schemas.

    `schemas`: indices into the library's schemas, best first. `snapshots`: their number.
    """

    centre_F: Floats
    schemas: tuple[int, ...]
    snapshots: int


@dataclass(frozen=True, slots=True, eq=False)
class Library:
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
    kinds: tuple[Kind, ...]

    def kind_of(self, features: dict[str, float]) -> int:
        """The index of the kind with the nearest centre."""
        scaled_F = self._scaled(features)
        away = [float(((kind.centre_F - scaled_F) ** 2).sum()) for kind in self.kinds]
        return int(np.argmin(away))

    def expected(self, features: dict[str, float]) -> Floats:
        """The predicted logarithm of each schema's cost, up to a constant, float64 [S]."""
        expected_S: Floats = self.intercept_S + self._scaled(features) @ self.slope_FS
        return expected_S

    def _scaled(self, features: dict[str, float]) -> Floats:
        value_F = np.array([features[name] for name in self.features])
        # Clipped, since the regression must not extrapolate to swarms unlike the training data.
        scaled_F: Floats = np.clip((value_F - self.mean_F) / self.scale_F, -3.0, 3.0)
        return scaled_F


@dataclass(frozen=True, slots=True)
class Tried:
    """A measured schema: predicted log cost (relative) and measured cost."""

    schema: str
    expected: float
    cost: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The best of the measured schemas."""

    kind: int
    schema: Recipe
    layout: Layout
    score: Score
    tried: tuple[Tried, ...]


def features_of_room(room: Room, *, shape: bool) -> dict[str, float]:
    """The features of `room`, those of the homology only with `shape`."""
    return plain_features(room) | (shape_features(room) if shape else {})


def choose_schema(library: Library, room: Room, *, tries: int = TRIES) -> Choice:
    """Apply the `tries` schemas with the lowest predicted cost, and return the best."""
    features = features_of_room(
        room, shape=any(name.startswith("h0.") for name in library.features)
    )
    number = library.kind_of(features)
    expected_S = library.expected(features)
    ranked = sorted(library.kinds[number].schemas, key=lambda schema: float(expected_S[schema]))
    best: tuple[float, Recipe, Layout, Score] | None = None
    tried = []
    for schema in ranked[: max(tries, 1)]:
        recipe = library.schemas[schema]
        layout = lay_out(room, recipe)
        score = measure(room, layout)
        cost = cost_of(room, score, library.goal)
        tried.append(Tried(recipe.name, float(expected_S[schema]), cost))
        if best is None or cost < best[0]:
            best = (cost, recipe, layout, score)
    assert best is not None, "every kind has a schema"
    return Choice(number, best[1], best[2], best[3], tuple(tried))


def cost_of(room: Room, score: Score, goal: Goal) -> float:
    """The cost to learn: the goal's cost, increased by the share of missing replicas."""
    wanted = room.replicas * room.problem.num_blocks
    return score.cost(goal) * (1.0 + score.lacks.replicas / wanted)


def costs_of(rooms: Sequence[Room], schemas: Sequence[Recipe], goal: Goal) -> Floats:
    """The cost [W, S] of every schema in every room; `_HOLE` times the room's worst with holes."""
    cost_WS = np.array(
        [
            [cost_of(room, measure(room, lay_out(room, schema)), goal) for schema in schemas]
            for room in rooms
        ]
    )
    return without_infinities(cost_WS)


def without_infinities(cost_WS: Floats) -> Floats:
    """`cost_WS` with infinite costs replaced by `_HOLE` times the row's largest finite one."""
    finite_WS = np.where(np.isfinite(cost_WS), cost_WS, np.nan)
    some_W1 = np.isfinite(finite_WS).any(axis=1, keepdims=True)
    worst_W1 = np.nanmax(np.where(some_W1, finite_WS, 1.0), axis=1, keepdims=True)
    filled: Floats = np.where(np.isfinite(cost_WS), cost_WS, _HOLE * worst_W1)
    return filled


def learn(
    cost_WS: Floats,
    features_W: Sequence[dict[str, float]],
    schemas: Sequence[Recipe],
    rng: np.random.Generator,
    *,
    num_blocks: int,
    goal: Goal = "latency",
    most_kinds: int = 5,
    schemas_per_kind: int = 12,
) -> Library:
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
    fitted = RidgeCV(alphas=_STRICTNESS).fit(scaled_WF, log_WS)
    kind_W = _cluster(scaled_WF, most_kinds, rng)
    kinds = tuple(
        Kind(
            scaled_WF[kind_W == kind].mean(axis=0),
            cover(cost_WS[kind_W == kind], schemas_per_kind),
            int((kind_W == kind).sum()),
        )
        for kind in np.unique(kind_W)
    )
    return Library(
        num_blocks=num_blocks,
        goal=goal,
        schemas=tuple(schemas),
        features=names,
        mean_F=mean_F,
        scale_F=scale_F,
        slope_FS=np.asarray(fitted.coef_, dtype=np.float64).reshape(len(schemas), -1).T,
        intercept_S=np.asarray(fitted.intercept_, dtype=np.float64).reshape(-1),
        kinds=kinds,
    )


def cover(cost_WS: Floats, most: int) -> tuple[int, ...]:
    """A greedy set of at most `most` schemas whose best member has the lowest mean cost ratio."""
    best_W1 = cost_WS.min(axis=1, keepdims=True)
    ratio_WS = cost_WS / best_W1
    chosen: list[int] = []
    so_far_W = np.full(len(cost_WS), np.inf)
    while len(chosen) < min(most, cost_WS.shape[1]):
        means_S = np.minimum(ratio_WS, so_far_W[:, None]).mean(axis=0)
        schema = int(means_S.argmin())
        if chosen and means_S[schema] >= so_far_W.mean() * (1 - 1e-6):
            break
        chosen.append(schema)
        so_far_W = np.minimum(so_far_W, ratio_WS[:, schema])
    return tuple(chosen)


def _cluster(scaled_WF: Floats, most: int, rng: np.random.Generator) -> Ints:
    """The kind of each snapshot, by k-means with the number of kinds of the best silhouette."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    best, best_W = 0.0, np.zeros(len(scaled_WF), dtype=np.int64)
    for count in range(2, min(most, len(scaled_WF) // 10) + 1):
        seed = int(rng.integers(1 << 31))
        found_W = KMeans(count, n_init=4, random_state=seed).fit_predict(scaled_WF)
        if np.bincount(found_W).min() < 5:
            continue
        separate = float(silhouette_score(scaled_WF, found_W))
        if separate > best:
            best, best_W = separate, found_W.astype(np.int64)
    return best_W
