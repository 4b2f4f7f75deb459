"""What the change triggers find, and what they take for a change that is none.

Traces with 3 % churn per snapshot, synthetic (`benchmarks/traces.py`), between
six regions of a real cloud, or recorded (`--matrix`). Those with an event count as found if a
trigger fires at its first or second snapshot. In quiet ones a planner (`toy_plans.py`) is asked at
every snapshot, whatever fired, and its plan is costed on later ones. A move is false if nothing was
lost and, without jitter, drift and congestion, its plan would not be 10 % better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.options import Options
from benchmarks.recorded_trace import load_round_trips, replay
from benchmarks.results import print_table
from benchmarks.toy_plans import STAGES, Placement, Smoothed, plan_cost
from benchmarks.traces import (
    TraceEvent,
    TraceEventKind,
    TraceSettings,
    TraceStep,
    generate_trace,
)
from nesa_node.topology.changes.detector import (
    BlockHoldings,
    ChangeState,
    Observation,
    PlanCostPair,
    judge_snapshot,
)
from nesa_node.topology.changes.triggers import TriggerName, make_connectivity
from nesa_node.topology.shape.merge_tree import make_filtration
from nesa_node.topology.tables import load_table

DEFAULTS = Options(runs=100, snapshots=1000)
QUICK = Options(runs=3, snapshots=60)
KINDS: tuple[TraceEventKind, ...] = ("partition", "regional loss", "detour", "bad pair")
TRIGGERS: tuple[TriggerName, ...] = get_args(TriggerName)
CHURN = 0.03
GAIN = 1.1
# Worlds of increasing disturbance. "calm" is a wide-area network of servers; "rough" has jitter of
# 10 % of each ping, and regions' round trips wander by 5 %.
WORLDS = {
    "calm": TraceSettings(jitter=0.03, noise_s=0.0005, drift=0.02, spike_share=0.002),
    "mild": TraceSettings(jitter=0.05, noise_s=0.002, drift=0.03),
    "mild, 4 regions": TraceSettings(jitter=0.05, noise_s=0.002, drift=0.03, regions=4),
    "rough": TraceSettings(),
}
Traces = Callable[[int, np.random.Generator, TraceEvent | None], Iterator[TraceStep]]


def run(options: Options) -> list[dict[str, Any]]:
    """One row per world: a quiet trace of `--snapshots` and `--runs` traces of each event."""
    rows = []
    for name, traces, longest, kinds in worlds(options):
        quiet_runs = watch_quiet(traces, options.snapshots, longest, options.seed)
        fired = {kind: watch_events(traces, kind, options.runs, options.seed) for kind in kinds}
        rows.append(
            {
                "world": name,
                "quiet": summed(quiet_runs),
                "found": {kind: shares(events) for kind, events in fired.items()},
                "runs": {"quiet": quiet_runs, "found": fired},
            }
        )
        print(f"{name}: done", flush=True)
    show(rows)
    return rows


def worlds(options: Options) -> Iterator[tuple[str, Traces, int, tuple[TraceEventKind, ...]]]:
    if options.matrix:
        table = load_round_trips(Path(options.matrix))

        def recorded(
            snapshots: int, rng: np.random.Generator, event: TraceEvent | None
        ) -> Iterator[TraceStep]:
            return replay(table, snapshots, rng, churn=CHURN, event=event)

        yield Path(options.matrix).name, recorded, len(table), KINDS[:3]
        return
    for name, world in WORLDS.items():

        def synthetic(
            snapshots: int,
            rng: np.random.Generator,
            event: TraceEvent | None,
            world: TraceSettings = world,
        ) -> Iterator[TraceStep]:
            return generate_trace(world, snapshots, rng, event)

        yield name, synthetic, options.snapshots, KINDS
    table_s_RR = load_table().rtt_ms_RR / 1e3

    def of_a_cloud(
        snapshots: int, rng: np.random.Generator, event: TraceEvent | None
    ) -> Iterator[TraceStep]:
        world = WORLDS["mild"]
        chosen = rng.choice(len(table_s_RR), world.regions, replace=False)
        apart_s_RR = table_s_RR[np.ix_(chosen, chosen)]
        return generate_trace(world, snapshots, rng, event, apart_s_RR=apart_s_RR)

    yield "regions of a cloud", of_a_cloud, options.snapshots, KINDS


def watch_quiet(traces: Traces, snapshots: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Triggers and moves on `snapshots` without any event, of each trace of at most 250."""
    runs = []
    seen = 0
    while seen < snapshots:
        length = min(250, longest, snapshots - seen)
        rng = np.random.default_rng((seed, 1, seen))
        counts: Counter[str] = Counter()
        gains: list[float] = []
        for _, fired, gain in follow(traces(length, rng, None), rng, plans=True):
            counts.update(fired)
            lost = not {"coverage", "replicas", "capacity"}.isdisjoint(fired)
            if gain is not None:
                gains.append(gain)
                kind = "for a loss" if lost else "for a gain" if gain >= GAIN else "false"
                counts[f"move {kind}"] += 1
        runs.append({"snapshots": length, "counts": dict(counts), "gains": gains})
        seen += length
    return runs


def summed(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All quiet traces together."""
    counts: Counter[str] = Counter()
    for one in runs:
        counts.update(one["counts"])
    return {
        "snapshots": sum(one["snapshots"] for one in runs),
        "counts": dict(counts),
        "gains": [gain for one in runs for gain in one["gains"]],
    }


def follow(
    steps: Iterator[TraceStep], rng: np.random.Generator, *, plans: bool
) -> Iterator[tuple[TraceStep, tuple[str, ...], float | None]]:
    """Each step, what fired, and the true gain of the move that followed, if one did.

    Without `plans` nothing moves.
    """
    state, placement, smoothed = ChangeState(), None, Smoothed()
    candidate: dict[str, int] = {}
    for step in steps:
        placement = placement or Placement(step, rng, proposals=1500 if plans else 0)
        placement.follow(step)
        usual_NN = smoothed.add(step)
        now, best = placement.stages(step), placement.held_by(step, candidate)
        costs = [plan_cost(stages, step, step.measured_s_NN) for stages in (now, best)]
        counted = Counter(now)
        observation = Observation(
            connections=make_connectivity(step.peers, make_filtration(step.measured_s_NN)),
            holdings=BlockHoldings(tuple(counted[s] for s in range(STAGES)), float(len(now))),
            plan=PlanCostPair(current=costs[0], best=costs[1]) if plans else None,
        )
        state, report = judge_snapshot(state, observation)
        gain = None
        if plans and report.should_move:
            if not report.plan_gained:
                best = placement.improved(step, usual_NN, proposals=80)
            true = [plan_cost(stages, step, step.true_s_NN) for stages in (now, best)]
            gain = true[0] / true[1]
            placement.adopt(step, best)
        if plans and (report.should_move or costs[0] <= GAIN * costs[1]):
            # Judged on the snapshots to come, not on the one that it was chosen by.
            chosen = placement.improved(step, usual_NN, proposals=80)
            candidate = dict(zip(step.peers, chosen, strict=True))
        yield step, report.fired, gain


def watch_events(traces: Traces, kind: TraceEventKind, runs: int, seed: int) -> list[list[str]]:
    """The triggers that found each of `runs` events in time."""
    found = []
    for number in range(runs):
        rng = np.random.default_rng((seed, 2, KINDS.index(kind), number))
        at = 30 + int(rng.integers(30))
        event = TraceEvent(kind=kind, at=at, region=number % 4)
        fired: set[str] = set()
        for step, now, _ in follow(traces(at + 2, rng, event), rng, plans=False):
            fired.update(now if step.at >= at else ())
        found.append(sorted(fired))
    return found


def shares(events: Sequence[Sequence[str]]) -> dict[str, float]:
    """The share of the events that each trigger found, and that any did."""
    counts = Counter(name for fired in events for name in (*fired, *(["any"] if fired else [])))
    return {name: count / len(events) for name, count in sorted(counts.items())}


def show(rows: Sequence[dict[str, Any]]) -> None:
    def per_1000(row: dict[str, Any], name: str) -> str:
        return (
            f"{1e3 * row['quiet']['counts'].get(name, 0) / max(row['quiet']['snapshots'], 1):.1f}"
        )

    alarms = tuple(name for name in TRIGGERS if name != "coverage")
    moves = ("move for a loss", "move for a gain", "move false")
    print_table(
        "changes: per 1,000 quiet snapshots with 3 % churn",
        "world|snapshots|" + "|".join((*alarms, *moves)),
        [
            (
                row["world"],
                str(row["quiet"]["snapshots"]),
                *(per_1000(row, name) for name in (*alarms, *moves)),
            )
            for row in rows
        ],
    )
    names = ("any", *(name for name in TRIGGERS if name != "plan"))
    print_table(
        "changes: found within two snapshots, % of events",
        "world|event|" + "|".join(names),
        [
            (row["world"], kind, *(f"{100 * found.get(name, 0):.0f}" for name in names))
            for row in rows
            for kind, found in row["found"].items()
        ],
    )
