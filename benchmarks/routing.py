"""What chains each strategy chooses, against the best there are, and how long it takes.

On made-up worlds, on worlds in the regions of a real cloud, and on a matrix of your own
(`--matrix`), none of which the greedy rule was tuned on. Ratios are to the optimum of the same
problem, means over all sessions: of one token's time (decode), of a chunk of 512 tokens (prefill),
and of the slowest node's seconds per token (to its lower bound where the optimum is not known).
"Session" is the mean step of the ten minutes that follow, recoveries included, to the shortest
there was: chains are chosen by what was seen before (`routing_worlds.py`). Reliability is the true
chance that no node of a chain fails. Throughput is what sessions that come one after another get
out of a swarm, relative to a linear program's bound.

Rows with "stability" are ablations: the same with a weight of 1 for stability by homology, which
is 0 as shipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.routing_worlds import CLIENTS, UNSEEN_PART, Session, sources
from benchmarks.saturation import max_tokens_per_s, saturate
from nesa_node.routing.chain_request import Chain, ChainProblem, CostWeights, step_time
from nesa_node.routing.search.exact import bottleneck_s, exact_latency, solve_bottleneck
from nesa_node.routing.search.greedy import SHIPPED_PARAMETERS, GreedyInputs, GreedyRule
from nesa_node.routing.strategies import (
    DEFAULT_STRATEGY,
    STRATEGIES,
    GreedyStrategy,
    LatencyStrategy,
    Strategy,
    make_session_strategy,
    make_strategy,
)

DEFAULTS = Options(nodes=(10, 30, 100, 300, 1000), runs=10)
QUICK = Options(nodes=(10, 30), runs=1)

T = TypeVar("T")

SESSIONS = "exact-latency, failures"
"""What sessions use by default: time, and what failures are expected to cost."""
STABILITY: Mapping[str, Strategy] = {
    "homology-greedy, stability": GreedyStrategy(replace(SHIPPED_PARAMETERS, stability_weight=1.0)),
    f"{SESSIONS}, stability": LatencyStrategy(failures=True, weights=CostWeights(stability=1.0)),
}
"""Ablations: what stability by homology adds to both rules."""
ROLES = {"exact-latency": "divisor of decode and prefill", SESSIONS: "default of sessions"}
FILLED = ("exact-throughput", "exact-latency")
_FILLED_LARGE = 2
"""Worlds of 1,000 nodes that are filled with sessions: that takes a quarter of a minute each."""
_TIMED = 3


@dataclass(slots=True)
class Figures:
    """Of one strategy in the worlds of one size, one per session; throughput one per world."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    session: list[float] = field(default_factory=list)
    bottleneck: list[float] = field(default_factory=list)
    reliability: list[float] = field(default_factory=list)
    hops: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    prepare_ms: list[float] = field(default_factory=list)
    choose_ms: list[float] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:
        return {
            "decode": fmean(self.decode),
            "decode_median": median(self.decode),
            "decode_worst": max(self.decode),
            "prefill": fmean(self.prefill),
            "prefill_median": median(self.prefill),
            "session": fmean(self.session),
            "bottleneck": fmean(self.bottleneck),
            "bottleneck_median": median(self.bottleneck),
            "reliability": fmean(self.reliability),
            "hops": fmean(self.hops),
            "throughput": fmean(self.throughput) if self.throughput else None,
            "throughput_least": min(self.throughput, default=None),
            "prepare_ms": median(self.prepare_ms),
            "choose_ms": median(self.choose_ms),
            "sessions": len(self.decode),
            "runs": asdict(self),
        }


def run(options: Options) -> list[dict[str, Any]]:
    """One row per source of worlds, size and strategy."""
    rows = []
    for source in sources(options):
        for count in source.sizes():
            figures = {name: Figures() for name in (*STRATEGIES, SESSIONS, *STABILITY)}
            gaps: list[float] = []
            worlds = range(options.seed, options.seed + options.runs)
            for at, session in enumerate(source.sessions(count, worlds, part=UNSEEN_PART)):
                gaps.append(measure(session, figures, options.seed))
                world, client = divmod(at, CLIENTS)
                if client == 0 and (count < 1000 or world < _FILLED_LARGE):
                    fill_world(session.decode, figures, options.seed)
            rows += [
                {
                    "world": source.name,
                    "nodes": count,
                    "strategy": name,
                    "role": ROLES.get(name),
                    "bottleneck_gap": max(gaps),
                    **each.as_row(),
                }
                for name, each in figures.items()
            ]
            show(rows[-len(figures) :])
    return rows


def measure(session: Session, figures: Mapping[str, Figures], seed: int) -> float:
    """Add a session's figures; returns the gap of its bottleneck."""
    decode, prefill = session.decode, session.prefill
    best_decode_s = step_time(decode, exact_latency(decode)).total_s
    best_prefill_s = step_time(prefill, exact_latency(prefill)).total_s
    least = solve_bottleneck(decode)
    for name, each in figures.items():
        rng = np.random.default_rng(seed)
        chain, prepare_ms, choose_ms = timed(name, decode, rng)
        long_chain = _strategy(name, rng).choose(prefill)
        each.decode.append(step_time(decode, chain).total_s / best_decode_s)
        each.prefill.append(step_time(prefill, long_chain).total_s / best_prefill_s)
        each.bottleneck.append(bottleneck_s(decode, chain) / least.bound_s)
        each.session.append(session.scenario.time_ratio(chain))
        nodes = [visit.node for visit in chain]
        each.reliability.append(float(session.survival_N[nodes].prod()))
        each.hops.append(len(chain))
        each.prepare_ms.append(prepare_ms)
        each.choose_ms.append(choose_ms)
    return least.gap


def timed(name: str, problem: ChainProblem, rng: np.random.Generator) -> tuple[Chain, float, float]:
    """A chain, milliseconds to prepare what does not depend on the session, and to choose it."""
    strategy = _strategy(name, rng)
    if isinstance(strategy, GreedyStrategy):
        parameters = strategy.parameters
        prepared, prepared_ms = _least_ms(
            lambda: GreedyRule(GreedyInputs.from_problem(problem), parameters)
        )
        chain, chosen_ms = _least_ms(prepared.choose)
        return chain, prepared_ms, chosen_ms
    chain, chosen_ms = _least_ms(lambda: strategy.choose(problem))
    return chain, 0.0, chosen_ms


def _strategy(name: str, rng: np.random.Generator) -> Strategy:
    if name in STABILITY:
        return STABILITY[name]
    if name == SESSIONS:
        return make_session_strategy(DEFAULT_STRATEGY, rng)
    return make_strategy(name, rng)


def _least_ms(work: Callable[[], T]) -> tuple[T, float]:
    """The result and the processor's time: other processes may share the core."""
    spent = []
    for _ in range(_TIMED):
        began = time.process_time()
        result = work()
        spent.append(1000.0 * (time.process_time() - began))
    return result, min(spent)


def fill_world(problem: ChainProblem, figures: Mapping[str, Figures], seed: int) -> None:
    bound = max_tokens_per_s(problem)
    for name in FILLED:
        strategy = make_strategy(name, np.random.default_rng(seed))
        figures[name].throughput.append(saturate(problem, strategy.choose) / bound)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    first = rows[0]
    print_table(
        f"{first['world']}, {first['nodes']} nodes, 80 blocks, {first['sessions']} sessions: "
        "means over the optimum (medians)",
        "strategy||decode|prefill|session|bottleneck|reliability|hops|throughput|prepare ms|"
        "choose ms",
        [
            (
                row["strategy"],
                row["role"] or "",
                f"{row['decode']:.3f} ({row['decode_median']:.3f})",
                f"{row['prefill']:.3f} ({row['prefill_median']:.3f})",
                f"{row['session']:.3f}",
                f"{row['bottleneck']:.2f} ({row['bottleneck_median']:.2f})",
                f"{row['reliability']:.3f}",
                f"{row['hops']:.1f}",
                "" if row["throughput"] is None else f"{row['throughput']:.2f}",
                f"{row['prepare_ms']:.2f}",
                f"{row['choose_ms']:.2f}",
            )
            for row in rows
        ],
    )
