"""What planning only where there is a cause saves, and what it costs.

Traces of round trips, nodes that come and go, and one event (`benchmarks/traces.py`, the regions of
a real cloud, or `--matrix`) are replayed at a look each half minute. Nodes that come choose their
spans as daemons do; a node that is asked to move loads for one look. The planner is the one of
orchestrators. "gated" runs the full planner where `LastPlan.why_replan` has a cause; "no homology"
does so without the triggers of merge trees (shift and region), "no triggers" without any; "every
look" runs it always. CPU is that of the whole decision, triggers included.

Costs are those of the placement in force by the true round trips, without jitter, drift and
congestion. Swarms begin well placed, and, in a column of their own, as nodes choose without a
planner. A move is false if nothing was lost and by the true round trips it gains less than 10 %, or
does not leave fewer blocks exposed. An event is found at the first look at which a full plan is
made for another cause than time.

Planning at every look, with which CPU and cost are compared, is shown four traces; events and false
moves come from `--runs` further traces of each event, too.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.recorded_trace import load_round_trips, replay
from benchmarks.results import print_table
from benchmarks.toy_plans import UNSERVED_S
from benchmarks.traces import (
    TraceEvent,
    TraceEventKind,
    TraceSettings,
    TraceStep,
    generate_trace,
)
from nesa_node.core.arrays import Floats
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.placement_problem import make_placement_problem
from nesa_node.routing.placement.plan import find_assignment
from nesa_node.routing.placement.score import PlacementScore, score_assignment
from nesa_node.routing.placement.spread import spread_holders
from nesa_node.server.orchestrator.planner import (
    PLAN_INTERVAL_S,
    PLAN_TRIGGERS,
    PlacementDecision,
    Rebalancer,
)
from nesa_node.server.orchestrator.swarm_score import (
    apply_moves,
)
from nesa_node.sharding.span_placement import choose_span
from nesa_node.swarm.dht.sealing import AnnouncedMove
from nesa_node.topology.changes.triggers import TriggerName
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.simulation.world import WORLD_MODEL
from nesa_node.topology.snapshot import NodeState, Snapshot
from nesa_node.topology.tables import load_table

DEFAULTS = Options(model="70b", runs=6, snapshots=45)
QUICK = Options(model="70b", runs=1, snapshots=10)
BLOCKS = 32
AMPLE, SCARCE = (2, 4, 8), (1, 2, 4)
"""Blocks that fit into a node, each as likely: 7 and 3.5 copies of the model on 48 nodes."""
BLOCK_S = 0.003
LINK_BYTES_PER_S = 1.25e7
LOOK_S = 30.0
EVENT_LOOKS = 3
"""Looks from an event on within which it counts as found, and after which the next trace begins."""
MIN_GAIN = 1.1
EVENTS: tuple[TraceEventKind, ...] = ("partition", "regional loss", "detour")
HOMOLOGY: frozenset[TriggerName] = frozenset({"shift", "region"})
GATES: Mapping[str, tuple[float, frozenset[TriggerName]]] = {
    "every look": (0.0, PLAN_TRIGGERS),
    "gated": (PLAN_INTERVAL_S, PLAN_TRIGGERS),
    "no homology": (PLAN_INTERVAL_S, PLAN_TRIGGERS - HOMOLOGY),
    "no triggers": (PLAN_INTERVAL_S, frozenset()),
}
HELD_OUT = 50_000
"""Seeds from here on: thresholds of triggers were chosen on traces of lower ones."""
MILD = TraceSettings(jitter=0.05, noise_s=0.002, drift=0.03, churn=0.003)
"""At each look 0.3 % of the nodes leave: a node stays for 2.8 h."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where traces come from: a world, the regions of a cloud, or a recorded table [T, N, N]."""

    name: str
    world: TraceSettings
    capacities: tuple[int, ...] = AMPLE
    apart_s_RR: Floats | None = None
    recorded_s_TNN: Floats | None = None

    def trace(self, looks: int, seed: int, event: TraceEvent | None) -> Iterator[TraceStep]:
        rng = np.random.default_rng((HELD_OUT, seed, zlib.crc32(self.name.encode())))
        if self.recorded_s_TNN is not None:
            yield from replay(self.recorded_s_TNN, looks, rng, churn=self.world.churn, event=event)
            return
        apart_s_RR = None
        if self.apart_s_RR is not None:
            chosen = rng.choice(len(self.apart_s_RR), self.world.regions, replace=False)
            apart_s_RR = self.apart_s_RR[np.ix_(chosen, chosen)]
        yield from generate_trace(self.world, looks, rng, event, apart_s_RR=apart_s_RR)


def sources(options: Options) -> Iterator[Source]:
    yield Source("mild", MILD)
    yield Source("rough", TraceSettings(churn=0.003))
    yield Source("mild, 3 % churn", replace(MILD, churn=0.03))
    yield Source("mild, 20 small regions", replace(MILD, nodes=80, regions=20))
    yield Source("cloud, little memory", MILD, SCARCE, load_table().rtt_ms_RR / 1e3)
    if options.matrix:
        path = Path(options.matrix)
        yield Source(path.name, MILD, recorded_s_TNN=load_round_trips(path))


class ReplayedSwarm:
    """The nodes of a trace with their spans: nodes that come choose one, and all moves are obeyed.

    Speed and capacity of a node follow from its name. `settled` swarms begin well placed.
    """

    def __init__(self, capacities: Sequence[int], *, settled: bool) -> None:
        self._capacities = capacities
        self._settled = settled
        self._nodes: dict[str, NodeState] = {}
        self._loading: set[str] = set()

    def look(self, step: TraceStep, moves: Sequence[AnnouncedMove]) -> Snapshot:
        """The snapshot of `step`, with the nodes that obey `moves` loading."""
        self._nodes = {peer: self._nodes[peer] for peer in step.peers if peer in self._nodes}
        self._loading = set()
        spans = {move.peer: move for move in moves}
        for peer, node in self._nodes.items():
            move = spans.get(node.peer_id)
            if move is not None and node.span == move.previous_span:
                self._nodes[peer] = node.with_span(move.span)
                self._loading.add(peer)
        for peer in step.peers:
            if peer not in self._nodes:
                self._nodes[peer] = self._joining_node(peer)
        known_s_NN = np.where(np.isinf(step.measured_s_NN), np.nan, step.measured_s_NN)
        if step.at == 0 and self._settled:
            self._settle(self.snapshot(step, known_s_NN))
        return self.snapshot(step, known_s_NN)

    def _settle(self, snapshot: Snapshot) -> None:
        """Place all nodes as the planner would, without a limit on moves."""
        request = ChainRequest(span=Span(0, BLOCKS))
        room = make_placement_problem(snapshot, request, replicas=2)
        placed = spread_holders(room, find_assignment(room, "latency")[0], "latency")
        rows = {peer: row for row, peer in enumerate(room.problem.peers)}
        self._nodes = {
            peer: node.with_span(placed.span(rows[node.peer_id]))
            for peer, node in self._nodes.items()
        }

    def _joining_node(self, peer: str) -> NodeState:
        rng = np.random.default_rng(zlib.crc32(peer.encode()))
        blocks, block_s = (
            int(rng.choice(self._capacities)),
            BLOCK_S * float(rng.lognormal(0.0, 0.5)),
        )
        there = Snapshot(WORLD_MODEL, BLOCKS, tuple(self._nodes.values()), 0.0)
        span = choose_span(there, blocks, tokens_per_s=1 / (block_s * blocks))
        name = hashlib.sha256(peer.encode()).hexdigest().replace("0", "z")
        return NodeState(
            PeerId(f"Qm{name}"[:46]),
            span,
            decode_tokens_per_s=1 / (block_s * blocks),
            max_blocks=blocks,
            movable=True,
        )

    def snapshot(self, step: TraceStep, seconds_NN: Floats) -> Snapshot:
        """The swarm of `step` with round trips of `seconds_NN`."""
        rate_NN = np.full_like(seconds_NN, LINK_BYTES_PER_S)
        age_s_NN = np.where(np.isnan(seconds_NN), np.nan, 0.0)
        links = Links(
            tuple(self._nodes[peer].peer_id for peer in step.peers),
            1e3 * seconds_NN,
            rate_NN,
            age_s_NN,
            np.isfinite(seconds_NN).astype(float),
        )
        return Snapshot(
            WORLD_MODEL,
            BLOCKS,
            tuple(self._nodes[peer] for peer in step.peers if peer not in self._loading),
            LOOK_S * step.at,
            tuple(self._nodes[peer] for peer in step.peers if peer in self._loading),
            links,
        )


def true_score(
    swarm: ReplayedSwarm, step: TraceStep, moves: Sequence[AnnouncedMove] = ()
) -> PlacementScore:
    """Score of the serving nodes, after `moves`, by the true round trips."""
    serving = replace(swarm.snapshot(step, step.true_s_NN), joining=())
    room = make_placement_problem(
        apply_moves(serving, moves), ChainRequest(span=Span(0, BLOCKS)), replicas=2
    )
    return score_assignment(room, room.current_assignment())


def follow(
    gate: str,
    source: Source,
    looks: int,
    seed: int,
    event: TraceEvent | None,
    *,
    settled: bool = True,
) -> Iterator[tuple[TraceStep, dict[str, Any]]]:
    """Each step of a trace, and what the planner did: CPU seconds of the decision, true cost of the
    placement, whether and why a full plan was made, and its moves.
    """
    interval_s, triggers = GATES[gate]
    planner = Rebalancer(plan_interval_s=interval_s, plan_triggers=triggers)
    swarm = ReplayedSwarm(source.capacities, settled=settled)
    asked: tuple[AnnouncedMove, ...] = ()
    steps = source.trace(looks, seed, event)
    for step in steps:
        snapshot = swarm.look(step, asked)
        began = time.process_time()
        decision = planner.decide(snapshot)
        cpu_s = time.process_time() - began
        score = true_score(swarm, step)
        yield (
            step,
            {
                "cpu_s": cpu_s,
                "cost_s": min(score.latency_s, UNSERVED_S),
                "exposed": score.exposed,
                "holes": score.deficit.holes,
                "planned": decision.planning.startswith("planned"),
                "timed": decision.planning.endswith("s old"),
                "move": judge_move(swarm, step, decision, asked),
            },
        )
        asked = decision.moves


def judge_move(
    swarm: ReplayedSwarm,
    step: TraceStep,
    decision: PlacementDecision,
    asked: Sequence[AnnouncedMove],
) -> str:
    """ "false" where nothing was lost and the moves gain too little; empty without new moves."""
    if not decision.moves or decision.moves == asked:
        return ""
    if decision.trigger not in ("gain", "spread"):
        return "for a loss"
    before, after = true_score(swarm, step), true_score(swarm, step, decision.moves)
    if decision.trigger == "spread":
        return "for spreading" if after.exposed < before.exposed else "false"
    return "for a gain" if before.latency_s >= MIN_GAIN * after.latency_s else "false"


def run(options: Options) -> list[dict[str, Any]]:
    """A row per source and gate."""
    rows = []
    for source in sources(options):
        compared = {gate: compare(source, gate, options) for gate in GATES}
        every = compared["every look"]
        for gate, of in compared.items():
            row = {"world": source.name, "gate": gate, **of}
            row["cpu_saved"] = 1 - of["cpu_s"] / every["cpu_s"]
            row["cost_ratio"] = of["cost_s"] / every["cost_s"]
            row["unsettled_cost_ratio"] = of["unsettled_cost_s"] / every["unsettled_cost_s"]
            if gate in ("gated", "no homology"):
                row |= detect(source, gate, options)
            rows.append(row)
            shown = ("full_plans", "cpu_saved", "cost_ratio", "unsettled_cost_ratio")
            print(source.name, gate, *(f"{row[key]:.3f}" for key in shown), flush=True)
    show(rows)
    return rows


def compare(source: Source, gate: str, options: Options) -> dict[str, Any]:
    """Means over traces without an event, with a partition and with the loss of a region from half
    of their looks on; and over one without an event in a swarm that begins as nodes chose."""
    looks = options.snapshots
    done: list[dict[str, Any]] = []
    runs = []
    for number, kind in enumerate((None, *EVENTS[:2])):
        event = TraceEvent(kind=kind, at=looks // 2, region=number) if kind else None
        told = [one for _, one in follow(gate, source, looks, number, event)]
        done += told
        runs.append({"event": kind or "none", "settled": True, "cost_s": mean(told, "cost_s")})
    unsettled = [one for _, one in follow(gate, source, looks, 10, None, settled=False)]
    runs.append({"event": "none", "settled": False, "cost_s": mean(unsettled, "cost_s")})
    everything = [*done, *unsettled]
    return {
        "looks": len(everything),
        "cpu_s": sum(one["cpu_s"] for one in everything),
        "full_plans": mean(everything, "planned"),
        "moves": dict(Counter(one["move"] for one in everything if one["move"])),
        "cost_s": mean(done, "cost_s"),
        "unsettled_cost_s": mean(unsettled, "cost_s"),
        "exposed": mean(everything, "exposed"),
        "looks_with_holes": float(np.mean([one["holes"] > 0 for one in everything])),
        "runs": runs,
    }


def detect(source: Source, gate: str, options: Options) -> dict[str, Any]:
    """Looks from each event to the first plan that it causes, and moves before it."""
    found: dict[str, list[int]] = {}
    moves: Counter[str] = Counter()
    quiet = 0
    for kind in EVENTS:
        found[kind] = []
        for number in range(options.runs):
            rng = np.random.default_rng((HELD_OUT, EVENTS.index(kind), number))
            at = 20 + int(rng.integers(20))
            event = TraceEvent(kind=kind, at=at, region=number % 4)
            seed = 100 + 100 * EVENTS.index(kind) + number
            first = EVENT_LOOKS + 1
            for step, one in follow(gate, source, at + EVENT_LOOKS, seed, event):
                if step.at < at:
                    quiet += 1
                    moves.update([one["move"]] if one["move"] else [])
                elif one["planned"] and not one["timed"]:
                    first = min(first, step.at - at + 1)
            found[kind].append(first)
    return {"found_at_look": found, "quiet_looks": quiet, "quiet_moves": dict(moves)}


def mean(of: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([one[key] for one in of]))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    def within_two(row: Mapping[str, Any], kind: str) -> str:
        found = row.get("found_at_look", {}).get(kind)
        return f"{100 * np.mean([look <= 2 for look in found]):.0f}" if found else ""

    def false_moves(row: Mapping[str, Any]) -> str:
        looks = row.get("quiet_looks", 0) + row["looks"]
        false = row["moves"].get("false", 0) + row.get("quiet_moves", {}).get("false", 0)
        return f"{false} of {looks}"

    print_table(
        "When to plan: against planning at every look",
        "world|planner|looks|CPU s|saved|cost|cost,\nunsettled|exposed|holes,\n% of looks|"
        "plans,\n% of looks|"
        "false moves|" + "|".join(f"{kind},\n% in 2" for kind in EVENTS),
        [
            (
                row["world"],
                row["gate"],
                str(row["looks"]),
                f"{row['cpu_s']:.1f}",
                f"{row['cpu_saved']:.1%}",
                f"{row['cost_ratio']:.4f}",
                f"{row['unsettled_cost_ratio']:.4f}",
                f"{row['exposed']:.1f}",
                f"{100 * row['looks_with_holes']:.1f}",
                f"{100 * row['full_plans']:.1f}",
                false_moves(row),
                *(within_two(row, kind) for kind in EVENTS),
            )
            for row in rows
        ],
    )
