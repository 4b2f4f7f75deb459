"""Change detector: evaluates all triggers on one snapshot, with the state passed in and out.

A trigger that fires asks for a new plan, not for a move. Blocks move after a loss, or if a plan
stays better by 10 % (`ChangeReport.should_move`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nesa_node.topology.changes.membership import (
    BlockHoldings,
    MembershipSnapshot,
    judge_departures,
    judge_membership,
    judge_region,
)
from nesa_node.topology.changes.shift import ConnectivitySnapshot, ShiftState, judge_shift
from nesa_node.topology.changes.triggers import JitterHistory, Sensitivity, Trigger, TriggerName

_LOSS_TRIGGERS: frozenset[TriggerName] = frozenset({"coverage", "replicas", "capacity"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCostPair:
    """Costs of the current plan and of the best one known on this snapshot, in one unit.

    Choose the best plan on earlier snapshots than the one on which both are costed, and keep it
    while it stays better: the best of many plans on one noisy measurement is biased.
    """

    current: float
    best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Input of the detector: one snapshot.

    Without `holdings`, the triggers of membership keep their state. Without `plan`, no better plan
    is known, and its count of agreeing snapshots restarts.
    """

    connections: ConnectivitySnapshot
    holdings: BlockHoldings | None = None
    plan: PlanCostPair | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ChangeState:
    """State of the detector between snapshots. Start with `ChangeState()`.

    rosters : of the last two snapshots, the newest last.
    """

    shift: ShiftState | None = None
    rosters: tuple[MembershipSnapshot, ...] = ()
    departures: JitterHistory = field(default_factory=JitterHistory)
    holdings: BlockHoldings | None = None
    plan_streak: int = 0
    gain_streak: int = 0
    sensitivity: Sensitivity = field(default_factory=Sensitivity)


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """Result of the detector. `plan_gained`: a better plan has stayed better for long enough to
    move.
    """

    triggers: tuple[Trigger, ...]
    plan_gained: bool = False

    @property
    def fired(self) -> tuple[TriggerName, ...]:
        return tuple(trigger.name for trigger in self.triggers if trigger.fired)

    @property
    def has_losses(self) -> bool:
        return not _LOSS_TRIGGERS.isdisjoint(self.fired)

    @property
    def should_replan(self) -> bool:
        """Whether to ask the planner; its result is the `plan` of the next observation."""
        return bool(self.fired)

    @property
    def should_move(self) -> bool:
        return self.has_losses or self.plan_gained


def judge_snapshot(state: ChangeState, now: Observation) -> tuple[ChangeState, ChangeReport]:
    """Evaluate all triggers on one snapshot. Raises `ValueError` for invalid input."""
    sensitivity = state.sensitivity
    shift, triggers = judge_shift(state.shift, now.connections, sensitivity)
    roster = MembershipSnapshot(now.connections.peers, now.connections.tree)
    departures, left = judge_departures(state.departures, state.rosters, roster, sensitivity)
    triggers += (left, judge_region(state.rosters, roster, sensitivity))
    holdings = state.holdings
    if now.holdings is not None:
        holdings, losses = judge_membership(state.holdings, now.holdings, sensitivity)
        triggers += losses
    in_a_row, sure, gains = 0, 0, False
    if now.plan is not None:
        plan = judge_plan(now.plan, state.plan_streak, sensitivity)
        triggers += (plan,)
        in_a_row = plan.in_a_row
        least = sensitivity.plan_gain * (1 + sensitivity.plan_error)
        sure = state.gain_streak + 1 if plan.figure > least else 0
        gains = sure >= sensitivity.move_in_a_row
        if gains:
            sure = 0
    rosters = (*state.rosters, roster)[-2:]
    after = ChangeState(shift, rosters, departures, holdings, in_a_row, sure, sensitivity)
    return after, ChangeReport(triggers, gains)


def judge_plan(costs: PlanCostPair, in_a_row: int, sensitivity: Sensitivity) -> Trigger:
    """Whether the current plan costs too much; `in_a_row` counts earlier snapshots that agreed.

    An infeasible plan has cost inf. Raises `ValueError` for costs that are negative or NaN.
    """
    if not (costs.current >= 0 and costs.best >= 0):
        raise ValueError(f"costs must be numbers from 0: {costs.current}, {costs.best}")
    same = costs.current <= costs.best
    ratio = 1.0 if same else costs.current / costs.best if costs.best > 0 else float("inf")
    in_a_row = in_a_row + 1 if ratio > sensitivity.plan_gain else 0
    return Trigger(
        name="plan",
        fired=in_a_row >= sensitivity.in_a_row,
        figure=ratio,
        threshold=sensitivity.plan_gain,
        in_a_row=in_a_row,
        reason=f"the current plan costs {ratio:.2f} times the best one known",
    )
