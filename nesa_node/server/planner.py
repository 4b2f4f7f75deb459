"""Planner of an orchestrator: decides on one snapshot what moves, and scores a swarm.

Pure but for what it remembers between snapshots; `Orchestrator` runs it in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.placement.capacity import make_room
from nesa_node.routing.placement.moves import MoveCosts, Moves
from nesa_node.routing.placement.rebalance import Policy, nothing, rebalance
from nesa_node.routing.placement.room import Layout, Room
from nesa_node.routing.placement.schemas import Choice, Library, choose_schema
from nesa_node.routing.placement.score import Goal, Score, measure
from nesa_node.server.watch import Watch
from nesa_node.server.worth import Worth
from nesa_node.swarm.notices import MAX_MOVES, MAX_NUMBER, Move
from nesa_node.topology.changes.detector import ChangeReport, PlanCosts
from nesa_node.topology.changes.triggers import Sensitivity, Trigger
from nesa_node.topology.snapshot import Snapshot

REPLICAS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to publish: nothing if there are no `moves`; then `reason` says why nothing moves.

    `planned` and `triggers` are for explanations only: the cost of the moves, and the changes seen.
    """

    moves: tuple[Move, ...]
    gain: float
    repairs: int
    latency_before_s: float | None
    latency_after_s: float | None
    steps_per_s_before: float | None
    steps_per_s_after: float | None
    strategy: str
    trigger: str
    reason: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    schema_name: str | None = None
    planned: Moves | None = None
    triggers: tuple[Trigger, ...] = ()


class Planner(Protocol):
    def decide(self, snapshot: Snapshot) -> Decision:
        """Decide on the next snapshot; runs in a thread."""


class Rebalancer:
    """Repairs losses at once, and moves for a gain only where a plan stays better for a while.

    The best of many plans on one noisy measurement always looks good. A plan is therefore kept, and
    its gain measured on the snapshots that follow.
    """

    def __init__(
        self,
        *,
        goal: Goal = "latency",
        replicas: int = REPLICAS,
        policy: Policy | None = None,
        costs: MoveCosts | None = None,
        sensitivity: Sensitivity | None = None,
        library: Callable[[], Library | None] = lambda: None,
    ) -> None:
        """`library` returns the known schemas. It is called for every snapshot, in the deciding
        thread.
        """
        self._goal: Goal = goal
        self._replicas = replicas
        self._policy = policy or Policy()
        self._costs = costs or MoveCosts()
        self._watch = Watch(sensitivity or Sensitivity(replicas_wanted=replicas))
        self._plan: Moves | None = None
        self._library = library

    def decide(self, snapshot: Snapshot) -> Decision:
        if snapshot.num_blocks < 1:
            return _nothing("no node serves the model")
        room = make_room(
            snapshot, Request(span=Span(0, snapshot.num_blocks)), replicas=self._replicas
        )
        schema = self._schema(room)
        decision = self._decide(snapshot, room, None if schema is None else schema.layout)
        return decision if schema is None else replace(decision, schema_name=schema.schema.name)

    def _schema(self, room: Room) -> Choice | None:
        """The schema for a swarm like this one, if any is known."""
        library = self._library()
        if library is None or room.problem.num_nodes == 0 or library.goal != self._goal:
            return None
        if library.num_blocks != room.problem.num_blocks:
            return None
        return choose_schema(library, room)

    def _decide(self, snapshot: Snapshot, room: Room, start: Layout | None) -> Decision:
        kept = self._measured(room)
        report = self._watch.observe(snapshot, None if kept is None else _plan_costs(kept))
        if kept is not None and report.gains:
            self._plan = None
            return self._describe(kept, report)
        found = rebalance(
            snapshot,
            Request(span=Span(0, snapshot.num_blocks)),
            goal=self._goal,
            replicas=self._replicas,
            policy=self._policy,
            costs=self._costs,
            pinned=frozenset(node.peer_id for node in snapshot.nodes if not node.movable),
            start=start,
        )
        if found.trigger != "gain":
            self._plan = None
            return self._describe(found, report)
        if kept is None or kept.gain < self._policy.min_gain:
            self._plan = found
        seen = f"{_finite_gain(found.gain):.0%} would be gained, if that lasts"
        return self._describe(nothing(found.before, self._goal, seen), report)

    def _measured(self, room: Room) -> Moves | None:
        """The kept plan with its current value.

        None if the spans of its nodes have changed, or blocks have lost holders that it counted on.
        """
        if self._plan is None:
            return None
        rows = {peer: row for row, peer in enumerate(room.problem.peers)}
        layout = now = room.now()
        for move in self._plan.moves:
            row = rows.get(move.peer_id)
            if row is None or now.span(row) != move.before:
                return None
            layout = layout.moved(row, move.after)
        before, after = measure(room, now), measure(room, layout)
        if before.lacks > self._plan.before.lacks or after.lacks > before.lacks:
            return None
        return replace(self._plan, before=before, after=after)

    def _describe(self, moves: Moves, report: ChangeReport) -> Decision:
        before, after = moves.before, moves.after
        return Decision(
            moves=tuple(
                Move(
                    peer=move.peer_id,
                    was=(move.before.start, move.before.end),
                    to=(move.after.start, move.after.end),
                    gain=_finite_gain(move.gain),
                )
                for move in moves.moves[:MAX_MOVES]
                if len(move.after)
            ),
            gain=_finite_gain(moves.gain),
            repairs=max(before.lacks.holes - after.lacks.holes, 0),
            latency_before_s=_finite(before.latency_s),
            latency_after_s=_finite(after.latency_s),
            steps_per_s_before=_finite(before.steps_per_s),
            steps_per_s_after=_finite(after.steps_per_s),
            strategy=f"rebalance-{self._goal}",
            trigger=moves.trigger,
            reason=_reason(moves, report),
            parameters={
                "min_gain": self._policy.min_gain,
                "horizon_s": self._policy.horizon_s,
                "replicas": float(self._replicas),
                "cost_s": _finite(moves.cost_s) or 0.0,
            },
            planned=moves,
            triggers=report.triggers,
        )


def appraise(snapshot: Snapshot) -> Worth:
    """Score the serving nodes as planners do."""
    serving = replace(snapshot, joining=())
    coverage = serving.coverage()
    holes = sum(count == 0 for count in coverage)
    thin = sum(max(REPLICAS - count, 0) for count in coverage)
    if not serving.nodes or serving.num_blocks < 1:
        return Worth(holes, thin, math.inf, 0.0)
    score: Score = measure_now(serving)
    return Worth(holes, thin, score.latency_s, score.steps_per_s)


def measure_now(snapshot: Snapshot) -> Score:
    room = make_room(snapshot, Request(span=Span(0, snapshot.num_blocks)))
    return measure(room, room.now())


def _plan_costs(moves: Moves) -> PlanCosts:
    return PlanCosts(current=moves.before.cost(moves.goal), best=moves.after.cost(moves.goal))


def _reason(moves: Moves, report: ChangeReport) -> str:
    """What moves and why, and what else has changed."""
    words = {
        "none": moves.refused or "nothing better was found",
        "hole": "blocks without a holder",
        "replicas": "replicas are missing",
        "gain": f"{_finite_gain(moves.gain):.0%} of the {moves.goal}'s cost is gained",
    }[moves.trigger]
    if moves.refused and moves.trigger != "none":
        words = f"{words}; {moves.refused}"
    return "; ".join((words, *report.fired))[:256]


def _nothing(reason: str) -> Decision:
    return Decision(
        moves=(),
        gain=0.0,
        repairs=0,
        latency_before_s=None,
        latency_after_s=None,
        steps_per_s_before=None,
        steps_per_s_after=None,
        strategy="none",
        trigger="none",
        reason=reason,
    )


def _finite(value: float) -> float | None:
    """Clamp to the range of a notice's numbers."""
    return float(min(value, MAX_NUMBER)) if math.isfinite(value) else None


def _finite_gain(value: float) -> float:
    """Clamp to [-1, 1]: a swarm without any chain saves all of an infinite cost."""
    return float(min(max(value, -1.0), 1.0))
