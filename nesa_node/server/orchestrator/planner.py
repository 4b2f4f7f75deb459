"""Planner of an orchestrator: decides on one snapshot what moves.

Pure but for what it remembers between snapshots; `Orchestrator` runs it in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

import numpy as np

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.moves import MoveCosts, RebalancePlan
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.rebalance import RebalancePolicy, no_moves, rebalance
from nesa_node.routing.placement.schemas import SchemaChoice, SchemaLibrary, choose_schema
from nesa_node.routing.placement.score import Goal, score_assignment
from nesa_node.server.orchestrator.swarm_score import REPLICAS
from nesa_node.swarm.dht.sealing import MAX_MAGNITUDE, MAX_PLACEMENT_MOVES, AnnouncedMove
from nesa_node.topology.changes.detector import (
    BlockHoldings,
    ChangeReport,
    ChangeState,
    Observation,
    PlanCostPair,
    judge_snapshot,
)
from nesa_node.topology.changes.triggers import (
    ConnectivitySnapshot,
    Sensitivity,
    Trigger,
    TriggerName,
    make_connectivity,
)
from nesa_node.topology.shape.merge_tree import round_trip_filtration
from nesa_node.topology.snapshot import Snapshot


class ChangeMonitor:
    def __init__(self, sensitivity: Sensitivity) -> None:
        self._state = ChangeState(sensitivity=sensitivity)
        self._num_blocks = 0

    def observe(self, snapshot: Snapshot, plan: PlanCostPair | None) -> ChangeReport:
        if snapshot.num_blocks != self._num_blocks:
            self._num_blocks = snapshot.num_blocks
            self._state = ChangeState(sensitivity=self._state.sensitivity)
        now = Observation(
            connections=_connections(snapshot), holdings=_holdings(snapshot), plan=plan
        )
        self._state, report = judge_snapshot(self._state, now)
        return report


def _holdings(snapshot: Snapshot) -> BlockHoldings:
    """Count announced spans of joining nodes too: a node that moves is no loss."""
    everyone = (*snapshot.nodes, *snapshot.joining)
    holders_B = np.zeros(snapshot.num_blocks, dtype=np.int64)
    for node in everyone:
        holders_B[node.span.start : node.span.end] += 1
    capacity = sum(node.decode_tokens_per_s * len(node.span) for node in everyone)
    return BlockHoldings(tuple(holders_B.tolist()), capacity)


def _connections(snapshot: Snapshot) -> ConnectivitySnapshot:
    """Pairs without a measurement count as not connected."""
    peers = tuple(node.peer_id for node in snapshot.nodes)
    return make_connectivity(peers, round_trip_filtration(snapshot))


SPREAD_LOOKS = 3
"""Further snapshots in a row in which moves must spread holders before they are made: round trips,
and with them failure domains, vary."""
PLAN_INTERVAL_S = 600.0
"""Seconds after which a full plan is made without any cause."""
PLAN_TRIGGERS: frozenset[TriggerName] = frozenset(get_args(TriggerName)) - {"plan"}
"""Triggers that ask for a full plan; "plan" judges one that is pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """What to publish: nothing if there are no `moves`; then `reason` says why nothing moves.

    `planned`, `triggers` and `planning` are for explanations only: the cost of the moves, the
    changes seen, and why a full plan was or was not made.
    """

    moves: tuple[AnnouncedMove, ...] = ()
    gain: float = 0.0
    repairs: int = 0
    latency_before_s: float | None = None
    latency_after_s: float | None = None
    steps_per_s_before: float | None = None
    steps_per_s_after: float | None = None
    strategy: str = "none"
    trigger: str = "none"
    reason: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    schema_name: str | None = None
    planned: RebalancePlan | None = None
    triggers: tuple[Trigger, ...] = ()
    planning: str = ""


_NOT_BETTER_NOW = "pending moves are no longer better"
_RETRY_INTERVAL_S = 300.0

HeldSpans = frozenset[tuple[PeerId, Span, bool]]


def held_spans(snapshot: Snapshot) -> HeldSpans:
    """The spans of all nodes, and whether they serve: no repair relies on a node that loads."""
    serving = ((node.peer_id, node.span, True) for node in snapshot.nodes)
    return frozenset((*serving, *((node.peer_id, node.span, False) for node in snapshot.joining)))


@dataclass(frozen=True, slots=True)
class LastPlan:
    """The last full plan: its cause, when and from which spans it was made, and the decision that
    stands, which is newer than the plan where moves had to be confirmed.
    """

    cause: str
    at: float
    num_blocks: int
    held: HeldSpans
    decision: PlacementDecision

    def why_replan(
        self,
        snapshot: Snapshot,
        report: ChangeReport,
        *,
        replicas: int,
        interval_s: float = PLAN_INTERVAL_S,
        triggers: frozenset[TriggerName] = PLAN_TRIGGERS,
    ) -> str:
        """Why a full plan is due on `snapshot`; empty if the last decision stands."""
        if snapshot.num_blocks != self.num_blocks:
            return "the model has another number of blocks"
        holders_B = _holdings(snapshot).holders_B
        if 0 in holders_B:
            return "blocks have no holder"
        if min(holders_B) < replicas and held_spans(snapshot) != self.held:
            return "replicas are missing, and spans have changed"
        if fired := [name for name in report.fired if name in triggers]:
            return f"triggers fired: {', '.join(fired)}"
        held = {(peer, span) for peer, span, _ in held_spans(snapshot)}
        moves = self.decision.moves
        if moves and held.isdisjoint((move.peer, move.previous_span) for move in moves):
            return "no node is left that should move"
        if not 0.0 <= snapshot.taken_at - self.at < interval_s:
            return f"the last plan is {snapshot.taken_at - self.at:.0f} s old"
        return ""


class PlacementPlanner(Protocol):
    def decide(self, snapshot: Snapshot) -> PlacementDecision:
        """Decide on the next snapshot; runs in a thread."""


class Rebalancer:
    """Repairs losses at once, and ahead of a forecast; moves for a gain, or to spread holders over
    failure domains, only where a plan stays better for a while.

    The best of many plans on one noisy measurement always looks good. A plan is therefore kept, and
    its gain measured on the snapshots that follow. The full planner runs only where there is a
    cause (`LastPlan.why_replan`); otherwise the last decision stands.
    """

    def __init__(
        self,
        *,
        goal: Goal = "latency",
        replicas: int = REPLICAS,
        policy: RebalancePolicy | None = None,
        costs: MoveCosts | None = None,
        sensitivity: Sensitivity | None = None,
        library: Callable[[], SchemaLibrary | None] = lambda: None,
        forecast: Callable[[Snapshot], Mapping[PeerId, float]] = lambda _: {},
        plan_interval_s: float = PLAN_INTERVAL_S,
        plan_triggers: frozenset[TriggerName] = PLAN_TRIGGERS,
    ) -> None:
        """`library` returns the known schemas, `forecast` the nodes that are likely to leave within
        the hour, and when (seconds since the epoch); both are called for every full plan in the
        deciding thread.

        With a `plan_interval_s` of 0 every snapshot is planned.
        """
        self._goal: Goal = goal
        self._replicas = replicas
        self._policy = policy or RebalancePolicy()
        self._costs = costs or MoveCosts()
        self._change_monitor = ChangeMonitor(sensitivity or Sensitivity(replicas_wanted=replicas))
        self._pending_plan: RebalancePlan | None = None
        self._pending_looks = 0
        self._library = library
        self._forecast = forecast
        self._plan_interval_s = plan_interval_s
        self._plan_triggers = plan_triggers
        self._last: LastPlan | None = None

    def decide(self, snapshot: Snapshot) -> PlacementDecision:
        if snapshot.num_blocks < 1:
            return PlacementDecision(reason="no node serves the model")
        room = make_placement_problem(
            snapshot, ChainRequest(span=Span(0, snapshot.num_blocks)), replicas=self._replicas
        )
        kept = self._remeasured_plan(room)
        costs = None if kept is None or kept.trigger != "gain" else _plan_costs(kept)
        report = self._change_monitor.observe(snapshot, costs)
        self._pending_looks += 1
        lasts = report.plan_gained if costs is not None else self._pending_looks >= SPREAD_LOOKS
        if self._last is not None and kept is not None and lasts:
            self._pending_plan = None
            decision = self._describe(kept, report, "not planned: pending moves stayed better")
            self._last = replace(self._last, decision=decision)
            return decision
        cause = self._why_plan(snapshot, room, kept, report)
        if self._last is not None and not cause:
            return self._standing_decision(self._last, snapshot, room, kept, report)
        schema = self._schema(room)
        decision = self._plan_moves(
            snapshot, kept, report, f"planned: {cause}", None if schema is None else schema.layout
        )
        if schema is not None:
            decision = replace(decision, schema_name=schema.schema.name)
        self._last = LastPlan(
            cause, snapshot.taken_at, snapshot.num_blocks, held_spans(snapshot), decision
        )
        return decision

    def _why_plan(
        self,
        snapshot: Snapshot,
        room: PlacementProblem,
        kept: RebalancePlan | None,
        report: ChangeReport,
    ) -> str:
        """Why a full plan is due; empty if the last decision stands. That pending moves are no
        longer better is rarely a cause twice: noise would be one at every other snapshot."""
        if self._last is None:
            return "there is no plan yet"
        why = self._last.why_replan(
            snapshot,
            report,
            replicas=self._replicas,
            interval_s=self._plan_interval_s,
            triggers=self._plan_triggers,
        )
        if why or self._pending_plan is None:
            return why
        if self._pending_layout(room) is None:
            return "nodes that should move are gone or have moved"
        is_retry = self._last.cause == _NOT_BETTER_NOW
        if self._is_good(kept) or (
            is_retry and snapshot.taken_at - self._last.at < _RETRY_INTERVAL_S
        ):
            return ""
        return _NOT_BETTER_NOW

    def _is_good(self, kept: RebalancePlan | None) -> bool:
        """Whether the pending plan, with its current value, is still worth making."""
        return kept is not None and (kept.trigger != "gain" or kept.gain >= self._policy.min_gain)

    def _standing_decision(
        self,
        last: LastPlan,
        snapshot: Snapshot,
        room: PlacementProblem,
        kept: RebalancePlan | None,
        report: ChangeReport,
    ) -> PlacementDecision:
        """The decision without a new plan. Repairs are repeated until spans change; pending moves
        are kept until the next plan, and have to last anew where they are not better by now."""
        planning = (
            f"not planned: the last plan, {snapshot.taken_at - last.at:.0f} s old, stands without "
            "a trigger or a loss"
        )
        stands = last.decision
        if stands.trigger in ("hole", "replicas", "ahead") and held_spans(snapshot) == last.held:
            return replace(stands, triggers=report.triggers, planning=planning)
        before = score_assignment(room, room.current_assignment()) if kept is None else kept.before
        if kept is not None and self._is_good(kept):
            refused = _pending_reason(kept)
        elif self._pending_plan is not None:
            refused = "what seemed better is not so now"
            self._pending_looks = -1  # as many further snapshots as after a plan
        elif stands.moves:
            refused = "the moves of the last placement are under way"
        else:
            refused = stands.planned.refused if stands.planned else ""
        decision = self._describe(no_moves(before, self._goal, refused), report, planning)
        return replace(decision, schema_name=stands.schema_name)

    def _schema(self, room: PlacementProblem) -> SchemaChoice | None:
        """The schema for a swarm like this one, if any is known."""
        library = self._library()
        if library is None or room.problem.num_nodes == 0 or library.goal != self._goal:
            return None
        if library.num_blocks != room.problem.num_blocks:
            return None
        return choose_schema(library, room)

    def _plan_moves(
        self,
        snapshot: Snapshot,
        kept: RebalancePlan | None,
        report: ChangeReport,
        planning: str,
        start: Assignment | None,
    ) -> PlacementDecision:
        """Decide by the full planner; `kept` is the pending plan with its current value."""
        found = rebalance(
            snapshot,
            ChainRequest(span=Span(0, snapshot.num_blocks)),
            goal=self._goal,
            replicas=self._replicas,
            policy=self._policy,
            costs=self._costs,
            pinned=frozenset(node.peer_id for node in snapshot.nodes if not node.movable),
            start=start,
            leaving=self._leaving(snapshot),
        )
        if found.trigger not in ("gain", "spread"):
            self._pending_plan = None
            return self._describe(found, report, planning)
        if not self._is_good(kept):
            self._pending_plan, self._pending_looks = found, 0
        return self._describe(
            no_moves(found.before, self._goal, _pending_reason(found)), report, planning
        )

    def _leaving(self, snapshot: Snapshot) -> Mapping[PeerId, float]:
        """The nodes that are likely to leave; none where no node followed the last moves ahead, so
        that other moves are planned in turns with these."""
        last = self._last
        if last and last.decision.trigger == "ahead" and last.held == held_spans(snapshot):
            return {}
        return self._forecast(snapshot)

    def _pending_layout(self, room: PlacementProblem) -> Assignment | None:
        """The swarm after the pending moves; None if a node is gone or has another span."""
        if self._pending_plan is None:
            return None
        rows = {peer: row for row, peer in enumerate(room.problem.peers)}
        layout = now = room.current_assignment()
        for move in self._pending_plan.moves:
            row = rows.get(move.peer_id)
            if row is None or now.span(row) != move.before:
                return None
            layout = layout.with_span(row, move.after)
        return layout

    def _remeasured_plan(self, room: PlacementProblem) -> RebalancePlan | None:
        """The kept plan with its current value; None if its nodes' spans or holders changed, if it
        exposes blocks to failure domains, or was to spread holders and does so no more."""
        layout, now = self._pending_layout(room), room.current_assignment()
        if self._pending_plan is None or layout is None:
            return None
        before, after = score_assignment(room, now), score_assignment(room, layout)
        if before.deficit > self._pending_plan.before.deficit or after.deficit > before.deficit:
            return None
        plan = replace(self._pending_plan, before=before, after=after)
        if plan.trigger == "spread" and not plan.spreads:
            return None
        return plan if after.exposed <= before.exposed else None

    def _describe(
        self, moves: RebalancePlan, report: ChangeReport, planning: str
    ) -> PlacementDecision:
        before, after = moves.before, moves.after
        return PlacementDecision(
            moves=tuple(
                AnnouncedMove(
                    peer=move.peer_id,
                    was=(move.before.start, move.before.end),
                    to=(move.after.start, move.after.end),
                    gain=_finite_gain(move.gain),
                )
                for move in moves.moves[:MAX_PLACEMENT_MOVES]
                if len(move.after)
            ),
            gain=_finite_gain(moves.gain),
            repairs=max(before.deficit.holes - after.deficit.holes, 0),
            latency_before_s=_finite(before.latency_s),
            latency_after_s=_finite(after.latency_s),
            steps_per_s_before=_finite(before.steps_per_s),
            steps_per_s_after=_finite(after.steps_per_s),
            strategy=f"rebalance-{self._goal}",
            trigger=moves.trigger,
            reason=_describe_reason(moves, report),
            parameters={
                "min_gain": self._policy.min_gain,
                "horizon_s": self._policy.horizon_s,
                "replicas": float(self._replicas),
                "cost_s": _finite(moves.cost_s) or 0.0,
            },
            planned=moves,
            triggers=report.triggers,
            planning=planning,
        )


def _plan_costs(moves: RebalancePlan) -> PlanCostPair:
    return PlanCostPair(current=moves.before.cost(moves.goal), best=moves.after.cost(moves.goal))


def _pending_reason(plan: RebalancePlan) -> str:
    if plan.trigger == "gain":
        return f"{_finite_gain(plan.gain):.0%} would be gained, if that lasts"
    return f"{plan.describe_spread()}, if that lasts"


def _describe_reason(moves: RebalancePlan, report: ChangeReport) -> str:
    """What moves and why, and what else has changed."""
    words = {
        "none": moves.refused or "nothing better was found",
        "hole": "blocks without a holder",
        "replicas": "replicas are missing",
        "ahead": moves.forecast,
        "gain": f"{_finite_gain(moves.gain):.0%} of the {moves.goal}'s cost is gained",
        "spread": moves.describe_spread(),
    }[moves.trigger]
    if moves.refused and moves.trigger != "none":
        words = f"{words}; {moves.refused}"
    return "; ".join((words, *report.fired))[:256]


def _finite(value: float) -> float | None:
    """Clamp to the range of a notice's numbers."""
    return float(min(value, MAX_MAGNITUDE)) if math.isfinite(value) else None


def _finite_gain(value: float) -> float:
    """Clamp to [-1, 1]: a swarm without any chain saves all of an infinite cost."""
    return float(min(max(value, -1.0), 1.0))
