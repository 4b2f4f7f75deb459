"""Does a node's place in the merge tree foretell trouble better than its uptime does?

Nodes are watched for a while, ranked, and watched on. Spearman's rank correlation of each predictor
with later trouble: uptime alone, and uptime together with how steady a height or a round trip was.
Heights are the scales at which a node is connected with half ("median") or a tenth ("near") of the
swarm; round trips at the same quantiles need no homology and are the control. Two predictors
together are the sum of their ranks.

Synthetic worlds: frail nodes are congested more often, and down more often. Trouble is the share of
later snapshots in which a node was either. Recorded (`--trace`): trouble is the share of a node's
later round trips that were twice as long as that pair's median, or never came back.

Legend: T snapshots, N nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import Options
from benchmarks.recorded_trace import load_round_trips
from benchmarks.results import print_table
from benchmarks.traces import TraceSettings, generate_trace
from nesa_node.topology.shape.merge_tree import make_filtration, merge_tree, quantile_heights
from nesa_node.topology.shape.stability import NEIGHBOURHOOD_QUANTILE, height_deviation

Floats = NDArray[np.float64]
DEFAULTS = Options(runs=20, snapshots=60)
QUICK = Options(runs=1, snapshots=12)
STEADINESS = ("median height", "near height", "median round trip", "near round trip")
PREDICTORS = ("uptime", *STEADINESS, *(f"{name} + uptime" for name in STEADINESS))
_DOWN = 0.01
_LATER = 4


def run(options: Options) -> list[dict[str, Any]]:
    """One row per world. `--snapshots` are watched, four times as many follow."""
    worlds: list[tuple[str, list[dict[str, float]]]] = []
    if options.matrix:
        worlds.append(
            (Path(options.matrix).name, [recorded(load_round_trips(Path(options.matrix)))])
        )
    else:
        for name, congestion_s in (("20 ms", 0.020), ("60 ms", 0.060)):
            world = TraceSettings(churn=0.0, frailty=1.0, congestion_s=congestion_s)
            results = [
                synthetic(world, options.snapshots, np.random.default_rng((options.seed, run)))
                for run in range(options.runs)
            ]
            worlds.append((f"congestion {name}", results))
    rows = [
        {
            "world": name,
            **{p: float(np.median([one[p] for one in found])) for p in PREDICTORS},
            "runs": found,
        }
        for name, found in worlds
    ]
    show(rows)
    return rows


def synthetic(world: TraceSettings, watched: int, rng: np.random.Generator) -> dict[str, float]:
    steps = list(generate_trace(world, watched * (1 + _LATER), rng))
    shape = len(steps), world.nodes
    down_TN = rng.random(shape) < _DOWN * steps[0].frailty_N
    trouble_TN = down_TN | (np.array([step.congestion_s_N for step in steps]) > 0)
    measured = [
        seen(step.measured_s_NN, ~down_N)
        for step, down_N in zip(steps[:watched], down_TN, strict=False)
    ]
    return correlations(measured, ~down_TN[:watched], trouble_TN[watched:].mean(axis=0))


def recorded(seconds_TNN: Floats) -> dict[str, float]:
    """The first half is watched."""
    half = len(seconds_TNN) // 2
    late_TNN = seconds_TNN[half:] > 2 * np.median(seconds_TNN, axis=0)
    up_TN = np.isfinite(seconds_TNN[:half]).mean(axis=2)
    everybody = np.ones(seconds_TNN.shape[1], dtype=bool)
    measured = [seen(seconds_NN, everybody) for seconds_NN in seconds_TNN[:half]]
    return correlations(measured, up_TN, late_TNN.mean(axis=(0, 2)))


def seen(seconds_NN: Floats, up_N: NDArray[np.bool_]) -> dict[str, Floats]:
    """[N] float64 for each of `STEADINESS`, NaN for nodes that are down."""
    nodes = np.flatnonzero(up_N)
    filtration = make_filtration(seconds_NN[np.ix_(nodes, nodes)])
    cap = 10 * filtration.median_weight()
    tree = merge_tree(filtration)
    trip_NN = np.minimum(filtration.weight_NN, cap)
    values = (
        quantile_heights(tree, 0.5, cap=cap),
        quantile_heights(tree, NEIGHBOURHOOD_QUANTILE, cap=cap),
        np.quantile(trip_NN, 0.5, axis=1),
        np.quantile(trip_NN, NEIGHBOURHOOD_QUANTILE, axis=1),
    )
    found = {name: np.full(len(up_N), np.nan) for name in STEADINESS}
    for name, value_N in zip(STEADINESS, values, strict=True):
        found[name][nodes] = value_N
    return found


def correlations(
    measured: Sequence[dict[str, Floats]], up_TN: NDArray[Any], trouble_N: Floats
) -> dict[str, float]:
    from scipy.stats import rankdata, spearmanr

    rank = {"uptime": rankdata(-up_TN.mean(axis=0))}
    for name in STEADINESS:
        rank[name] = rankdata(height_deviation(np.array([values[name] for values in measured])))
    found = {}
    for name in PREDICTORS:
        together = np.sum([rank[part] for part in name.split(" + ")], axis=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nobody was down: no correlation
            found[name] = float(np.nan_to_num(spearmanr(together, trouble_N).statistic))
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "stability: rank correlation with later trouble, medians",
        "world|" + "|".join(name.replace(" + ", "\n+ ") for name in PREDICTORS),
        [(row["world"], *(f"{row[name]:.2f}" for name in PREDICTORS)) for row in rows],
    )
