"""Parameters of the greedy rule by the genetic algorithm, judged on worlds that it has not seen.

`nesa_node/routing/search/greedy.py` is what this prints. `--nodes`, and per size `--runs` worlds to
learn from and twice as many to be judged on, of 1,000 nodes and more a third. `--ga printed` takes
the paper's own operators (`printed_ga.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.printed_ga import run_printed
from benchmarks.results import print_table
from benchmarks.routing_worlds import Source
from nesa_node.routing.chain_request import step_time
from nesa_node.routing.search.greedy import GreedyParameters, GreedyRule
from nesa_node.routing.tuner import TuningReport, TuningScenario, tune

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
    if options.ga == "printed":
        return run_printed(options, learn, held_out, rng)
    began = time.perf_counter()
    report = tune(learn, held_out, rng, before=START, generations=min(options.runs, 20))
    seconds = time.perf_counter() - began
    print(f"{len(learn)} sessions to learn from, {len(held_out)} held out, {seconds:.0f} s")
    saved = 1.0 - report.winner_ratios / report.before_ratios
    gain, gain_error = float(saved.mean()), float(saved.std() / math.sqrt(len(saved)))
    print(verdict(report, gain, gain_error))
    print(recommended(report, gain, gain_error))
    found = {
        "before": (START, None, report.before_ratios),
        "genetic": (report.genetic.best, report.genetic, report.genetic_ratios),
        "random": (report.random.best, report.random, report.random_ratios),
    }
    rows = [
        {
            "parameters": name,
            **asdict(parameters),
            "learned": search.cost if search else None,
            "history": search.history if search else (),
            "held_out": float(ratios.mean()),
            **latencies(parameters, held_out),
            "gain": gain,
            "gain_error": gain_error,
            "candidates": report.evaluations,
            "sessions": len(learn),
            "seconds": seconds,
        }
        for name, (parameters, search, ratios) in found.items()
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


def recommended(report: TuningReport, gain: float, gain_error: float) -> GreedyParameters:
    """The winner if its gain exceeds two standard errors, else the parameters before."""
    return report.winner if gain > 2.0 * gain_error else report.before


def verdict(report: TuningReport, gain: float, gain_error: float) -> str:
    before, genetic, random = (
        float(ratios.mean())
        for ratios in (report.before_ratios, report.genetic_ratios, report.random_ratios)
    )
    won = "beats" if genetic < random else "does NOT beat"
    kept = "is kept" if recommended(report, gain, gain_error) == report.before else "goes"
    return (
        f"held out: before {before:.4f}, genetic {genetic:.4f}, random {random:.4f}; the genetic "
        f"algorithm {won} random search of as many candidates ({report.evaluations}); the winner "
        f"saves {gain:.2%} +- {gain_error:.2%}, what was before {kept}"
    )


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
