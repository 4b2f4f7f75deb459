"""Schema libraries: precomputed from the stored snapshots of a live swarm, and as JSON.

The newest snapshots are held out. A library is learnt with and without features of the network's
shape; the one whose choices have less regret there is used, if that is little, and is then learnt
again from all snapshots.

W snapshots, S schemas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.placement_problem import PlacementProblem, make_placement_problem
from nesa_node.routing.placement.recipes import Recipe
from nesa_node.routing.placement.schemas import (
    CANDIDATE_SCHEMAS,
    MAX_SCHEMAS_TRIED,
    SchemaLibrary,
    TopologyCluster,
    learn_library,
    placement_features,
    schema_costs,
)
from nesa_node.routing.placement.score import Goal
from nesa_node.routing.tuning_scenario import sample_snapshots
from nesa_node.topology.snapshot import Snapshot

MIN_SNAPSHOTS = 16
"""Snapshots needed for a library."""
MAX_SNAPSHOTS = 96
HELD_OUT_FRACTION = 1 / 3
MAX_REGRET = 0.05


@dataclass(frozen=True, slots=True)
class PrecomputedLibrary:
    """A schema library, or None if none is worth using, with the reason.

    `regret`: mean relative excess, on held-out snapshots, of the chosen schema over the best one;
    `other_regret`: that of the library which was not taken, with or without shape.
    """

    library: SchemaLibrary | None
    reason: str
    regret: float | None = None
    other_regret: float | None = None
    snapshots: int = 0


def precompute_library(
    snapshots: Sequence[Snapshot],
    rng: np.random.Generator,
    *,
    goal: Goal,
    replicas: int,
    seconds: float,
    clock: Callable[[], float],
) -> PrecomputedLibrary:
    """A library for the swarm of `snapshots` (oldest first), in about `seconds` of `clock`."""
    chosen = sample_snapshots(snapshots, MAX_SNAPSHOTS)
    if len(chosen) < MIN_SNAPSHOTS:
        return PrecomputedLibrary(
            None, f"{len(chosen)} snapshots are too few, {MIN_SNAPSHOTS} are needed"
        )
    blocks = chosen[-1].num_blocks
    chosen = [snapshot for snapshot in chosen if snapshot.num_blocks == blocks]
    began = clock()
    schema_costs([snapshot_placement_problem(chosen[0], replicas)], CANDIDATE_SCHEMAS, goal)
    chosen = sample_snapshots(chosen, int(seconds / max(clock() - began, 1e-6)))
    if len(chosen) < MIN_SNAPSHOTS:
        return PrecomputedLibrary(None, f"{seconds:g} s suffice for {len(chosen)} snapshots only")
    instances = [snapshot_placement_problem(snapshot, replicas) for snapshot in chosen]
    cost_WS = schema_costs(instances, CANDIDATE_SCHEMAS, goal)
    cut = round(len(instances) * (1 - HELD_OUT_FRACTION))

    def learnt(features_W: Sequence[dict[str, float]]) -> SchemaLibrary:
        return learn_library(
            cost_WS[: len(features_W)],
            features_W,
            CANDIDATE_SCHEMAS,
            rng,
            num_blocks=blocks,
            goal=goal,
        )

    regrets: dict[bool, float] = {}
    features: dict[bool, list[dict[str, float]]] = {}
    for shape in (False, True):
        features[shape] = [placement_features(each, with_homology=shape) for each in instances]
        library = learnt(features[shape][:cut])
        regrets[shape] = mean_regret(library, cost_WS[cut:], features[shape][cut:])
    shape = regrets[True] < regrets[False]
    regret, other = regrets[shape], regrets[not shape]
    found = (
        f"{regret:.1%} above the best schema on {len(instances) - cut} held-out snapshots, "
        f"{'with' if shape else 'without'} features of shape ({other:.1%} "
        f"{'without' if shape else 'with'})"
    )
    if regret > MAX_REGRET:
        reason = f"{found}: more than {MAX_REGRET:.0%}"
        return PrecomputedLibrary(None, reason, regret, other, len(chosen))
    library = learnt(features[shape])
    kinds = f"{len(library.clusters)} kinds of topology in {len(chosen)} snapshots"
    return PrecomputedLibrary(library, f"{found}; {kinds}", regret, other, len(chosen))


def snapshot_placement_problem(snapshot: Snapshot, replicas: int) -> PlacementProblem:
    """The placement problem of `snapshot` for a client at an unknown place."""
    request = ChainRequest(span=Span(0, snapshot.num_blocks))
    return make_placement_problem(snapshot, request, replicas=replicas)


def mean_regret(
    library: SchemaLibrary, cost_WS: Floats, features_W: Sequence[dict[str, float]]
) -> float:
    """Mean relative excess of the best tried schema over the best of all schemas."""
    regrets = []
    for cost_S, features in zip(cost_WS, features_W, strict=True):
        schemas = np.array(library.clusters[library.nearest_cluster(features)].schemas)
        tried = schemas[
            np.argsort(library.expected_log_costs(features)[schemas], kind="stable")[
                :MAX_SCHEMAS_TRIED
            ]
        ]
        regrets.append(cost_S[tried].min() / cost_S.min() - 1.0)
    return float(np.mean(regrets))


LIBRARY_VERSION = 1
MAX_LIBRARY_BYTES = 4 << 20

_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_SmallCount = Annotated[int, Meta(ge=0, le=64)]
_Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
_Numbers = Annotated[list[_Number], Meta(max_length=256)]


class _StrictDocument(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _SchemaDocument(_StrictDocument):
    name: _Name
    pipelines: _SmallCount
    searched: bool
    cut: Literal["quickest", "even"]
    order: Literal["memory", "speed", "near"]
    regions: Annotated[int, Meta(ge=1, le=64)]


class _ClusterDocument(_StrictDocument):
    centre: _Numbers
    schemas: Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(min_length=1, max_length=256)]
    snapshots: Annotated[int, Meta(ge=0, le=1 << 40)]


class _LibraryDocument(_StrictDocument):
    version: int
    num_blocks: Annotated[int, Meta(ge=1, le=10_000)]
    goal: Literal["latency", "throughput"]
    schemas: Annotated[list[_SchemaDocument], Meta(min_length=1, max_length=256)]
    features: Annotated[list[_Name], Meta(min_length=1, max_length=256)]
    mean: _Numbers
    scale: _Numbers
    slope: Annotated[list[_Numbers], Meta(max_length=256)]
    intercept: _Numbers
    kinds: Annotated[list[_ClusterDocument], Meta(min_length=1, max_length=64)]


def encode_library(library: SchemaLibrary) -> bytes:
    return msgspec.json.encode(
        _LibraryDocument(
            version=LIBRARY_VERSION,
            num_blocks=library.num_blocks,
            goal=library.goal,
            schemas=[_SchemaDocument(**asdict(schema)) for schema in library.schemas],
            features=list(library.features),
            mean=library.mean_F.tolist(),
            scale=library.scale_F.tolist(),
            slope=library.slope_FS.tolist(),
            intercept=library.intercept_S.tolist(),
            kinds=[
                _ClusterDocument(kind.centroid_F.tolist(), list(kind.schemas), kind.snapshots)
                for kind in library.clusters
            ],
        )
    )


def decode_library(text: bytes | str, *, source: str = "schemas") -> SchemaLibrary:
    """Parse and validate the output of `encode_library`; untrusted input is allowed.

    Raises `ConfigError`, which names `source`.
    """
    if len(text) > MAX_LIBRARY_BYTES:
        raise ConfigError(f"{source} has {len(text)} bytes; at most {MAX_LIBRARY_BYTES} are read")
    try:
        told = msgspec.json.decode(text, type=_LibraryDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    if told.version != LIBRARY_VERSION:
        raise ConfigError(
            f"{source} has version {told.version}, this program reads {LIBRARY_VERSION}"
        )
    sizes = (len(told.features), len(told.schemas))
    rows = [told.mean, told.scale, *(kind.centre for kind in told.kinds)]
    columns = [told.intercept, *told.slope]
    fits = (
        len(told.slope) == sizes[0]
        and all(len(row) == sizes[0] for row in rows)
        and all(len(column) == sizes[1] for column in columns)
        and all(schema < sizes[1] for kind in told.kinds for schema in kind.schemas)
        and all(scale > 0 and math.isfinite(scale) for scale in told.scale)
    )
    if not fits:
        raise ConfigError(f"{source}: its tables do not fit its {sizes[0]} features and schemas")
    return SchemaLibrary(
        num_blocks=told.num_blocks,
        goal=told.goal,
        schemas=tuple(Recipe(**msgspec.structs.asdict(schema)) for schema in told.schemas),
        features=tuple(told.features),
        mean_F=np.array(told.mean, dtype=np.float64),
        scale_F=np.array(told.scale, dtype=np.float64),
        slope_FS=np.array(told.slope, dtype=np.float64).reshape(sizes),
        intercept_S=np.array(told.intercept, dtype=np.float64),
        clusters=tuple(
            TopologyCluster(
                np.array(kind.centre, dtype=np.float64), tuple(kind.schemas), kind.snapshots
            )
            for kind in told.kinds
        ),
    )
