"""Change detector: evaluates all triggers on one snapshot, with the state passed in and out.

A trigger that fires asks for a new plan, not for a move. Blocks move after a loss, or if a plan
stays better by 10 % (`ChangeReport.should_move`).

The merge trees' shift compares only nodes that are in both snapshots, so it does not see
departures. A region that left is a branch of the previous tree.

Legend: B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.topology.changes.triggers import (
    ConnectivitySnapshot,
    JitterHistory,
    Sensitivity,
    ShiftState,
    Trigger,
    TriggerName,
    judge_jitter,
    judge_shift,
)
from nesa_node.topology.shape.merge_tree import MergeTree


@dataclass(frozen=True, slots=True)
class BlockHoldings:
    """Number of holders of each block, and the capacity of all nodes in any one unit (tokens/s)."""

    holders_B: tuple[int, ...]
    capacity: float


@dataclass(frozen=True, slots=True, eq=False)
class MembershipSnapshot:
    """Nodes of one snapshot and their merge tree; peers[n] is node n of the tree."""

    peers: tuple[str, ...]
    tree: MergeTree


def judge_membership(
    reference: BlockHoldings | None, now: BlockHoldings, sensitivity: Sensitivity
) -> tuple[BlockHoldings, tuple[Trigger, ...]]:
    """Evaluate coverage, replicas and capacity against the reference; returns its update, too.

    Each trigger fires at once: an expired record is no jitter. Coverage fires as long as a block
    has no holder; replicas and capacity fire once per loss, since the reference then drops to the
    present state. It rises with every gain.

    Raises `ValueError` if the number of blocks changed.
    """
    before = reference or now
    if len(before.holders_B) != len(now.holders_B):
        raise ValueError(f"{len(before.holders_B)} blocks became {len(now.holders_B)}")
    bare = [block for block, holders in enumerate(now.holders_B) if holders == 0]
    thin = [
        block
        for block, (held, holders) in enumerate(zip(before.holders_B, now.holders_B, strict=True))
        if holders < min(held, sensitivity.replicas_wanted)
    ]
    lost = 1.0 - now.capacity / before.capacity if before.capacity > 0 else 0.0
    short = lost > sensitivity.capacity_lost
    triggers = (
        _immediate_trigger(
            "coverage", len(bare), 0.0, f"{len(bare)} blocks without a holder{_format_blocks(bare)}"
        ),
        _immediate_trigger(
            "replicas",
            len(thin),
            0.0,
            f"{len(thin)} blocks lost holders and have fewer than "
            f"{sensitivity.replicas_wanted}{_format_blocks(thin)}",
        ),
        _immediate_trigger(
            "capacity",
            max(lost, 0.0),
            sensitivity.capacity_lost,
            f"{max(lost, 0.0):.1%} of the capacity is gone; {sensitivity.capacity_lost:.0%} count",
        ),
    )
    holders = now.holders_B if thin else tuple(map(max, before.holders_B, now.holders_B))
    capacity = now.capacity if short else max(before.capacity, now.capacity)
    return BlockHoldings(holders, capacity), triggers


def judge_departures(
    jitter: JitterHistory,
    before: tuple[MembershipSnapshot, ...],
    now: MembershipSnapshot,
    sensitivity: Sensitivity,
) -> tuple[JitterHistory, Trigger]:
    """Whether unusually many nodes left since the last of the snapshots `before`.

    One snapshot is enough to fire: records do not jitter, and a node cannot leave twice.
    """
    peers = set(before[-1].peers if before else ())
    share = len(peers.difference(now.peers)) / len(peers) if peers else 0.0
    once = replace(sensitivity, in_a_row=1, least_threshold=sensitivity.least_departed)
    what = "{} of the nodes left since the last snapshot"
    return judge_jitter(jitter, "departures", share, once, what)


def judge_region(
    before: tuple[MembershipSnapshot, ...], now: MembershipSnapshot, sensitivity: Sensitivity
) -> Trigger:
    """Whether a whole branch of the merge tree left, however small.

    `before` holds at most the last two snapshots, the older one first: a region's records expire
    one after another, and the trigger fires with the last of them. With 3 % churn, three random
    departures form a branch once in 1,000 snapshots (`benchmarks changes`).
    """
    left = 0
    there = set(now.peers)
    if before and not there.issuperset(before[-1].peers):
        gone_N = np.array([peer not in there for peer in before[0].peers], dtype=np.bool_)
        left = before[0].tree.largest_branch(gone_N)
    reason = f"{left} nodes that lay together are all gone; {sensitivity.least_region} are a region"
    return _immediate_trigger("region", left, sensitivity.least_region - 1, reason)


def _immediate_trigger(name: TriggerName, figure: float, threshold: float, reason: str) -> Trigger:
    fired = figure > threshold
    return Trigger(
        name=name,
        fired=fired,
        figure=float(figure),
        threshold=threshold,
        in_a_row=int(fired),
        reason=reason,
    )


def _format_blocks(blocks: list[int], most: int = 8) -> str:
    if not blocks:
        return ""
    more = ", ..." if len(blocks) > most else ""
    return f" ({', '.join(map(str, blocks[:most]))}{more})"


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
