"""Precomputed schemas against the planner: what choosing one costs, and the time it saves.

Swarms of different kinds (regions, homes, memory given) hold one model; a library is learnt from
some and judged on others. Regret is the mean, over held-out swarms, of (cost of what was chosen) /
(cost of the best schema of all) - 1, where the cost is the mean latency of four clients. All
schemas are applied to every swarm once; what a choice takes is timed apart. "With homology": the
statistics of persistent homology are features, too. "As an orchestrator chooses": with or without
them, by which was better on a third of the swarms that are learnt from
(`routing/placement/schema_library.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.routing_worlds import client_request
from nesa_node.core.arrays import Floats, Ints
from nesa_node.routing.placement.placement_problem import PlacementProblem, make_placement_problem
from nesa_node.routing.placement.plan import find_assignment
from nesa_node.routing.placement.schema_library import HELD_OUT_FRACTION, mean_regret
from nesa_node.routing.placement.schemas import (
    CANDIDATE_SCHEMAS,
    MAX_SCHEMAS_TRIED,
    SchemaLibrary,
    choose_schema,
    learn_library,
    placement_features,
    schema_costs,
)
from nesa_node.topology.simulation.world import make_world

DEFAULTS = Options(model="70b", nodes=(16, 48), runs=160)
QUICK = Options(model="70b", nodes=(12, 16), runs=24)
BLOCKS = 32
CLIENTS = 4
HELD_OUT = 0.375
PLANNED = 24
"""Held-out swarms that the planner places, too."""


def run(options: Options) -> list[dict[str, Any]]:
    """Of `options.runs` swarms with `options.nodes` (least, most) nodes."""
    rooms = [make_swarm(options.seed + number, options.nodes) for number in range(options.runs)]
    cost_WS = schema_costs(rooms, CANDIDATE_SCHEMAS, "latency")
    features_W = [placement_features(room, with_homology=True) for room in rooms]
    held_out = max(1, round(options.runs * HELD_OUT))
    train, test = slice(None, -held_out), slice(len(rooms) - held_out, None)
    libraries: dict[str, SchemaLibrary] = {}
    for name, kept in (("plain", _plain(features_W)), ("with homology", features_W)):
        libraries[name] = learn_library(
            cost_WS[train],
            kept[train],
            CANDIDATE_SCHEMAS,
            np.random.default_rng(options.seed),
            num_blocks=BLOCKS,
        )
    preferred = _prefer(cost_WS[train], features_W[train], options.seed)
    libraries["as an orchestrator chooses"] = libraries[preferred]
    rows = [
        *_controls(cost_WS[train], cost_WS[test], options.seed),
        *(
            _judged(name, library, cost_WS[test], features_W[test], tries)
            for name, library in libraries.items()
            for tries in (1, MAX_SCHEMAS_TRIED)
        ),
    ]
    rows += [_against_planner(name, each, rooms[test]) for name, each in libraries.items()]
    about = {"swarms": len(rooms), "held_out": held_out, "schemas": len(CANDIDATE_SCHEMAS)}
    print(f"better on a third of the swarms that are learnt from: {preferred}")
    rows = [about | {"preferred": preferred} | row for row in rows]
    show(rows)
    return rows


def _prefer(cost_WS: Floats, features_W: Sequence[dict[str, float]], seed: int) -> str:
    """Whichever of plain features and those of homology chooses better on the last third."""
    cut = round(len(cost_WS) * (1 - HELD_OUT_FRACTION))
    regrets = {}
    for name, kept in (("plain", _plain(features_W)), ("with homology", features_W)):
        library = learn_library(
            cost_WS[:cut],
            kept[:cut],
            CANDIDATE_SCHEMAS,
            np.random.default_rng(seed),
            num_blocks=BLOCKS,
        )
        regrets[name] = mean_regret(library, cost_WS[cut:], kept[cut:])
    return min(regrets, key=lambda name: regrets[name])


def make_swarm(seed: int, nodes: Sequence[int]) -> PlacementProblem:
    """A swarm of one of several kinds, whose operators give all of their memory or a part."""
    rng = np.random.default_rng(seed)
    world = make_world(
        int(rng.integers(nodes[0], nodes[-1] + 1)),
        BLOCKS,
        rng,
        num_regions=int(rng.choice([1, 2, 4, 8])),
        num_clients=CLIENTS,
        residential_share=float(rng.choice([0.2, 0.7, 1.0])),
    )
    given = float(rng.choice([1.0, 0.5, 0.3]))
    most_N = np.array([min(node.max_blocks, BLOCKS) for node in world.snapshot.nodes])
    most_N = np.maximum(1, (most_N * given).astype(np.int64))
    while most_N.sum() < 1.6 * BLOCKS:
        most_N = np.minimum(most_N + 1, BLOCKS)
    states = tuple(
        replace(node, max_blocks=int(most))
        for node, most in zip(world.snapshot.nodes, most_N, strict=True)
    )
    requests = [client_request(world, client) for client in range(CLIENTS)]
    return make_placement_problem(replace(world.snapshot, nodes=states), requests, replicas=2)


def _plain(features_W: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    homology = ("h0.", "h1.", "nodes", "unit", "parts")
    return [
        {name: value for name, value in features.items() if not name.startswith(homology)}
        for features in features_W
    ]


def _controls(train_WS: Floats, test_WS: Floats, seed: int) -> list[dict[str, Any]]:
    """Always the schema, or the three, that were best on average; and three at random."""
    mean_S = (train_WS / train_WS.min(axis=1, keepdims=True)).mean(axis=0)
    order = np.argsort(mean_S)
    rng = np.random.default_rng(seed)
    at_random = [rng.choice(len(mean_S), size=MAX_SCHEMAS_TRIED, replace=False) for _ in test_WS]
    return [
        _row("always the same", [order[:1]] * len(test_WS), test_WS),
        _row(
            f"always the same {MAX_SCHEMAS_TRIED}, best measured",
            [order[:MAX_SCHEMAS_TRIED]] * len(test_WS),
            test_WS,
        ),
        _row(f"{MAX_SCHEMAS_TRIED} at random, best measured", at_random, test_WS),
    ]


def _judged(
    name: str,
    library: SchemaLibrary,
    cost_WS: Floats,
    features_W: Sequence[dict[str, float]],
    tries: int,
) -> dict[str, Any]:
    picked = []
    for features in features_W:
        schemas = np.array(library.clusters[library.nearest_cluster(features)].schemas)
        picked.append(schemas[np.argsort(library.expected_log_costs(features)[schemas])[:tries]])
    choice = "predicted alone" if tries == 1 else f"best of {tries} measured"
    row = _row(f"{name}, {choice}", picked, cost_WS)
    return row | {"kinds": len(library.clusters), "features": len(library.features)}


def _row(name: str, picked_W: Sequence[Ints], cost_WS: Floats) -> dict[str, Any]:
    regrets = np.array(
        [
            cost_S[picked].min() / cost_S.min() - 1.0
            for picked, cost_S in zip(picked_W, cost_WS, strict=True)
        ]
    )
    return {
        "choice": name,
        "regret": float(regrets.mean()),
        "regret_p95": float(np.quantile(regrets, 0.95)),
        "best_found": float((regrets < 1e-9).mean()),
        "runs": [{"regret": regret} for regret in regrets.tolist()],
    }


def _against_planner(
    name: str, library: SchemaLibrary, rooms: Sequence[PlacementProblem]
) -> dict[str, Any]:
    """The choice, done in full and timed, next to the planner on the same swarms."""
    runs = []
    for room in rooms[:PLANNED]:
        started = time.process_time()
        choice = choose_schema(library, room)
        chosen = time.process_time()
        _, score, _ = find_assignment(room, "latency")
        runs.append(
            {
                "gap_to_planner": choice.score.latency_s / score.latency_s - 1.0,
                "choosing_s": chosen - started,
                "planning_s": time.process_time() - chosen,
            }
        )
    means = {key: fmean(one[key] for one in runs) for key in runs[0]}
    return {"choice": f"{name}, against the planner", **means, "runs": runs}


def show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    print_table(
        f"{first['schemas']} schemas, {first['held_out']} of {first['swarms']} swarms held out, "
        f"{BLOCKS} blocks",
        "choice|mean regret|95th percentile|best found|over planner|choosing\ns|planning\ns",
        [
            [
                row["choice"],
                *(
                    f"{row[key]:.1%}" if key in row else "-"
                    for key in ("regret", "regret_p95", "best_found", "gap_to_planner")
                ),
                *(f"{row[key]:.3f}" if key in row else "-" for key in ("choosing_s", "planning_s")),
            ]
            for row in rows
        ],
    )
