"""Parameters of the greedy rule by the genetic algorithm, judged on worlds that it has not seen.

`nesa_node/routing/search/greedy.py` is what this prints. `--nodes`, and per size `--runs` worlds to
learn from and twice as many to be judged on, of 1,000 nodes and more a third.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.routing_worlds import Source
from nesa_node.routing.problem import step_time
from nesa_node.routing.search.greedy import GreedyParameters, GreedyRule
from nesa_node.routing.tuning.scenarios import TuningScenario
from nesa_node.routing.tuning.tuner import tune

DEFAULTS = Options(nodes=(10, 30, 100, 300, 1000), runs=40)
QUICK = Options(nodes=(10, 30), runs=2)
START = GreedyParameters()

_LEARN_FROM = 1_000_000
_HELD_OUT = 2_000_000
"""Seeds that no other benchmark uses."""


def run(options: Options) -> list[dict[str, Any]]:
    """One row per set of parameters: before, genetic, random."""
    rng = np.random.default_rng(options.seed)
    learn = scenarios(options, _LEARN_FROM, options.runs, rng)
    held_out = scenarios(options, _HELD_OUT, 2 * options.runs, rng)
    began = time.perf_counter()
    report = tune(learn, held_out, rng, before=START, generations=min(options.runs, 20))
    seconds = time.perf_counter() - began
    print(f"{len(learn)} sessions to learn from, {len(held_out)} held out, {seconds:.0f} s")
    print(report)
    print(report.recommended)
    found = {
        "before": (START, None, report.held_out_before),
        "genetic": (report.genetic.best, report.genetic, report.held_out_genetic),
        "random": (report.random.best, report.random, report.held_out_random),
    }
    rows = [
        {
            "parameters": name,
            **asdict(parameters),
            "learned": search.cost if search else None,
            "history": search.history if search else (),
            "held_out": cost,
            **latencies(parameters, held_out),
            "gain": report.gain,
            "gain_error": report.gain_error,
            "candidates": report.evaluations,
            "sessions": len(learn),
            "seconds": seconds,
        }
        for name, (parameters, search, cost) in found.items()
    ]
    print_table(
        "Greedy rule: mean latency over the optimum, on held-out worlds",
        "|".join(("parameters", "fitness", *(f"{count} nodes" for count in options.nodes))),
        [
            (
                str(row["parameters"]),
                f"{row['held_out']:.4f}",
                *(f"{ratio:.3f}" for ratio in row["held_out_latency"].values()),
            )
            for row in rows
        ],
    )
    return rows


def scenarios(
    options: Options, seed: int, worlds: int, rng: np.random.Generator
) -> list[TuningScenario]:
    source = Source("made up", options)
    return [
        TuningScenario.from_problem(session.decode, rng)
        for count in options.nodes
        for session in source.sessions(count, range(seed, seed + _fewer(worlds, count)))
    ]


def _fewer(worlds: int, num_nodes: int) -> int:
    return worlds if num_nodes < 1000 else -(-worlds // 3)


def latencies(parameters: GreedyParameters, held_out: Sequence[TuningScenario]) -> dict[str, Any]:
    """The mean by size, failures apart, and every session's."""
    ratios: dict[int, list[float]] = {}
    for scenario in held_out:
        problem = scenario.prepared.problem
        chain = GreedyRule(scenario.prepared, parameters).choose()
        ratio = step_time(problem, chain).total_s / scenario.optimum_s
        ratios.setdefault(problem.num_nodes, []).append(ratio)
    means = {count: fmean(values) for count, values in ratios.items()}
    return {"held_out_latency": means, "runs": {"held_out_latency": ratios}}
