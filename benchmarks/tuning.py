"""Parameters of the greedy rule and weights of the default cost by the genetic algorithm.

Both are learnt from sessions in worlds that were watched before and after the choice
(`routing_worlds.py`), and judged on worlds that the search has not seen: for each source `--nodes`,
and per size `--runs` worlds to learn from and twice as many to be judged on, of 1,000 nodes and
more a third. A recorded matrix (`--matrix`) is learnt from its first two thirds, and judged on its
last. Ablated: the best that is found without stability by homology; added: weights of memory and of
cache. What this finds is what `SHIPPED_PARAMETERS` and `SHIPPED_WEIGHTS` say. `--ga printed` takes
the paper's own operators (`printed_ga.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.printed_ga import run_printed
from benchmarks.results import print_table
from benchmarks.routing_worlds import LEARNT_PART, UNSEEN_PART, Source, sources
from nesa_node.core.arrays import Floats
from nesa_node.routing.chain_request import SHIPPED_WEIGHTS
from nesa_node.routing.search.greedy import GreedyParameters
from nesa_node.routing.tuner import COST_GENES, RULE_GENES, Genes, GeneSpace, TuningReport, tune
from nesa_node.routing.tuning_scenario import TuningScenario

DEFAULTS = Options(nodes=(10, 30, 100, 300), runs=12)
QUICK = Options(nodes=(10, 30), runs=2)
START = GreedyParameters()

_LEARN_FROM = 1_000_000
_HELD_OUT = 2_000_000
"""Seeds that no other benchmark uses."""
STABILITY_WEIGHTS = (0.25, 0.5, 1.0, 2.0)
MEMORY_WEIGHTS = (0.03, 0.1, 0.3)

Scenarios = Mapping[str, Sequence[TuningScenario]]
"""By source."""


def run(options: Options) -> list[dict[str, Any]]:
    """Rows per kind of parameters: before, genetic, random, and ablations of stability."""
    rng = np.random.default_rng(options.seed)
    of = sources(options)
    # Swarms in the cloud's regions are only judged on.
    learn = {each.name: _scenarios(each, options, learn=True) for each in of if each.name != "gcp"}
    held_out = {each.name: _scenarios(each, options, learn=False) for each in of}
    if options.ga == "printed":
        return run_printed(options, _all(learn), _all(held_out), rng)
    generations = min(options.runs, 20)
    return [
        *_tuned("greedy rule", RULE_GENES, START, learn, held_out, rng, generations),
        *_tuned("default cost", COST_GENES, SHIPPED_WEIGHTS, learn, held_out, rng, generations),
    ]


def _scenarios(source: Source, options: Options, *, learn: bool) -> list[TuningScenario]:
    first, part = (_LEARN_FROM, LEARNT_PART) if learn else (_HELD_OUT, UNSEEN_PART)
    worlds = options.runs if learn else 2 * options.runs
    return [
        session.scenario
        for count in source.sizes()
        for session in source.sessions(
            count, range(first, first + _fewer(worlds, count)), part=part
        )
    ]


def _fewer(worlds: int, num_nodes: int) -> int:
    return worlds if num_nodes < 1000 else -(-worlds // 3)


def _all(scenarios: Scenarios) -> list[TuningScenario]:
    return [each for some in scenarios.values() for each in some]


def _tuned(
    name: str,
    space: GeneSpace[Genes],
    start: Genes,
    learn: Scenarios,
    held_out: Scenarios,
    rng: np.random.Generator,
    generations: int,
) -> list[dict[str, Any]]:
    began = time.perf_counter()
    report = tune(
        _all(learn), _all(held_out), rng, space=space, before=start, generations=generations
    )
    seconds = time.perf_counter() - began
    print(f"{name}: {len(_all(learn))} sessions to learn from, {seconds:.0f} s")
    gain, gain_error = gain_of(report.winner_ratios, report.before_ratios)
    print(verdict(report, gain, gain_error))
    print(recommended(report, gain, gain_error))
    found = {
        "before": (start, None, report.before_ratios),
        "genetic": (report.genetic.best, report.genetic, report.genetic_ratios),
        "random": (report.random.best, report.random, report.random_ratios),
        **{
            label: (parameters, None, space.time_ratios(parameters, _all(held_out)))
            for label, parameters in ablations(start, report.genetic.best)
        },
    }
    rows = [
        {
            "tuned": name,
            "parameters": label,
            **asdict(parameters),
            "learned": search.cost if search else None,
            "history": search.history if search else (),
            **held_out_figures(ratios, report.before_ratios, held_out),
            "candidates": report.evaluations,
            "sessions": len(_all(learn)),
            "seconds": seconds,
        }
        for label, (parameters, search, ratios) in found.items()
    ]
    show(name, rows, tuple(space.bounds))
    return rows


def ablations(start: Genes, best: Genes) -> Iterator[tuple[str, Genes]]:
    """Stability by homology, memory or cache alone added to what is shipped; stability taken from
    what was found."""
    for value in STABILITY_WEIGHTS:
        yield f"before, stability {value:g}", _with_stability(start, value)
    if isinstance(start, GreedyParameters):
        for value in MEMORY_WEIGHTS:
            yield f"before, memory {value:g}", replace(start, memory_weight=value)
            yield f"before, cache {value:g}", replace(start, cache_weight=value)
    yield "genetic without stability", _with_stability(best, 0.0)


def _with_stability(parameters: Genes, weight: float) -> Genes:
    if isinstance(parameters, GreedyParameters):
        return replace(parameters, stability_weight=weight)
    return replace(parameters, stability=weight)


def gain_of(ratios: Floats, before: Floats) -> tuple[float, float]:
    """The mean share of a session's time that is saved, and its standard error."""
    saved = 1.0 - ratios / before
    return float(saved.mean()), float(saved.std(ddof=1) / math.sqrt(len(saved)))


def held_out_figures(ratios: Floats, before: Floats, held_out: Scenarios) -> dict[str, Any]:
    """Means and gains of all held-out sessions, and of those of each source."""
    gain, gain_error = gain_of(ratios, before)
    figures: dict[str, Any] = {"held_out": float(ratios.mean()), "gain": gain}
    figures["gain_error"] = gain_error
    figures["by_source"], figures["runs"] = {}, {}
    first = 0
    for name, scenarios in held_out.items():
        of = slice(first, first + len(scenarios))
        first += len(scenarios)
        gain, gain_error = gain_of(ratios[of], before[of])
        figures["by_source"][name] = {
            "ratio": fmean(ratios[of]),
            "gain": gain,
            "gain_error": gain_error,
        }
        figures["runs"][name] = ratios[of].tolist()
    return figures


def recommended(report: TuningReport[Genes], gain: float, gain_error: float) -> Genes:
    """The winner if its gain exceeds two standard errors, else the parameters before."""
    return report.winner if gain > 2.0 * gain_error else report.before


def verdict(report: TuningReport[Genes], gain: float, gain_error: float) -> str:
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


def show(name: str, rows: Sequence[Mapping[str, Any]], genes: Sequence[str]) -> None:
    headings = [gene.replace("_", "\n") for gene in genes]
    print_table(
        f"{name}: mean time of a session over the shortest, held out, and the share saved",
        "|".join(("parameters", *headings, "all", *rows[0]["by_source"])),
        [
            (
                str(row["parameters"]),
                *(f"{row[gene]:.3g}" for gene in genes),
                f"{row['held_out']:.4f} {row['gain']:+.2%}",
                *(
                    f"{each['ratio']:.3f} {each['gain']:+.2%} ±{each['gain_error']:.2%}"
                    for each in row["by_source"].values()
                ),
            )
            for row in rows
        ],
    )
