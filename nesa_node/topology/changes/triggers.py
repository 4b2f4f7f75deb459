"""Triggers of the change detector: changes of round trips, judged relative to their past.

The threshold of a figure adapts: 1.5 x the 95th percentile of its past, twice in a row.

Three figures measure round trips. *Shift* compares merge trees: the scales at which nodes connect.
It misses a detour on links outside the spanning tree, hence *round trips*, the mean change of
pairs, and *places*, the median change of each node's round trips, in which disturbances of single
pairs cancel. `benchmarks changes` has the detection rates.

Legend: N nodes, S sampled nodes, C nodes in all snapshots compared, K snapshots of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats
from nesa_node.topology.shape.merge_tree import Filtration, MergeTree, mean_difference, merge_tree

TriggerName = Literal[
    "shift",
    "round trips",
    "places",
    "departures",
    "region",
    "coverage",
    "replicas",
    "capacity",
    "plan",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Result of one trigger: its `figure`, the `threshold` to exceed, and both as a `reason`.

    `in_a_row` counts the consecutive snapshots, this one included, above the threshold.
    """

    name: TriggerName
    fired: bool
    figure: float
    threshold: float
    in_a_row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Thresholds of all triggers.

    The factors 1.5 and 1.1, the 95th percentile and two in a row come from a prototype's traces.

    jitter_factor, jitter_percentile : the threshold is this factor times this percentile of past
        shifts.
    in_a_row : consecutive snapshots above the threshold before a shift or a better plan fires.
    history : maximum number of past shifts. With fewer than `least_history`, `first_threshold`
        applies.
    least_threshold : minimum threshold of a shift, as a fraction of the median round trip.
    reference : number of latest unchanged snapshots that the next one is compared with.
    unreachable : median round trips that a pair without any connection counts as.
    least_departed : minimum threshold of the fraction of nodes that leave at once.
    least_region : minimum number of nodes in a lost branch that counts as a region.
    replicas_wanted : fewer holders of a block than this, and than before, are a loss.
    capacity_lost : the lost fraction of capacity that fires.
    plan_gain : the ratio of the current plan's cost to the best one's that fires.
    plan_error : relative error of that ratio. To move, the ratio must exceed `plan_gain` by it in
        `move_in_a_row` consecutive snapshots.
    """

    jitter_factor: float = 1.5
    jitter_percentile: float = 95.0
    in_a_row: int = 2
    history: int = 200
    least_history: int = 12
    first_threshold: float = 0.25
    least_threshold: float = 0.02
    reference: int = 5
    unreachable: float = 10.0
    least_departed: float = 0.05
    least_region: int = 3
    replicas_wanted: int = 2
    capacity_lost: float = 0.1
    plan_gain: float = 1.1
    plan_error: float = 0.1
    move_in_a_row: int = 4


@dataclass(frozen=True, slots=True)
class JitterHistory:
    """History of one figure: `past` values that were jitter, oldest first, and undecided ones."""

    calm_figures: tuple[float, ...] = ()
    pending: tuple[float, ...] = ()

    def threshold(self, sensitivity: Sensitivity) -> float:
        if len(self.calm_figures) < sensitivity.least_history:
            return sensitivity.first_threshold
        usual = float(np.percentile(self.calm_figures, sensitivity.jitter_percentile))
        return max(sensitivity.jitter_factor * usual, sensitivity.least_threshold)


def judge_jitter(
    jitter: JitterHistory, name: TriggerName, figure: float, sensitivity: Sensitivity, what: str
) -> tuple[JitterHistory, Trigger]:
    """Evaluate one figure; the updated history and the trigger. `what` is its reason, with {}.

    A figure above the threshold that the next snapshot does not confirm was jitter and joins the
    history, so that the threshold adapts. A figure that fired does not.
    """
    threshold = jitter.threshold(sensitivity)
    above = figure > threshold
    pending = (*jitter.pending, figure) if above else ()
    found = Trigger(
        name=name,
        fired=len(pending) >= sensitivity.in_a_row,
        figure=figure,
        threshold=threshold,
        in_a_row=len(pending),
        reason=f"{what.format(f'{figure:.1%}')}; above {threshold:.1%} is no jitter",
    )
    if above:
        return JitterHistory(jitter.calm_figures, () if found.fired else pending), found
    past = (*jitter.calm_figures, *jitter.pending, figure)
    return JitterHistory(past[-sensitivity.history :]), found


_Text = Annotated[str, Meta(max_length=512)]
_Numbers = Annotated[dict[_Text, float], Meta(max_length=64)]


class TriggerReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value and threshold of one trigger; `figure` is None where it was infinite."""

    name: _Text
    fired: bool
    figure: float | None
    threshold: float
    reason: _Text = ""


class HistoryEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One observation of the swarm and the decision made on it; small, as thousands are kept.

    `at` is seconds since the epoch. `parameters` are those of moves, `exponents` those of the
    greedy rule, with the reason for them. `leads` says whether the observer held the lease; without
    it, it decides nothing.
    """

    at: float
    digest: _Text
    nodes: int
    leads: bool = False
    seen: Annotated[tuple[TriggerReading, ...], Meta(max_length=16)] = ()
    latency_s: float | None = None
    steps_per_s: float | None = None
    strategy: _Text | None = None
    schema: _Text | None = None
    placement: _Text | None = None
    reason: _Text = ""
    parameters: _Numbers = {}
    exponents: _Numbers = {}
    why_exponents: _Text = ""

    @property
    def fired_triggers(self) -> tuple[TriggerReading, ...]:
        return tuple(seen for seen in self.seen if seen.fired)


def trigger_readings(triggers: Iterable[Trigger]) -> tuple[TriggerReading, ...]:
    """Readings of `triggers`; the reason is kept only for those that fired, to save space."""
    return tuple(
        TriggerReading(
            trigger.name,
            trigger.fired,
            trigger.figure if math.isfinite(trigger.figure) else None,
            trigger.threshold,
            trigger.reason[:512] if trigger.fired else "",
        )
        for trigger in triggers
    )


# Maximum number of nodes with stored round trips: 160 kB a snapshot.
_MAX_SAMPLED_NODES = 200
_MAX_COMPARED_NODES = 500


@dataclass(frozen=True, slots=True, eq=False)
class ConnectivitySnapshot:
    """A snapshot's round trips and their merge tree.

    peers : the names of the filtration's nodes, in its order.
    """

    peers: tuple[str, ...]
    filtration: Filtration
    tree: MergeTree


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceSnapshot:
    """Data of a snapshot that later ones are compared with.

    place : each peer's index in the tree.
    unit : the median round trip, at least the smallest positive number.
    sampled : the sampled peers' indices in weight_SS, [S, S] float32.
    """

    index_of: dict[str, int]
    tree: MergeTree
    median_rtt: float
    sampled: dict[str, int]
    weight_SS: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ShiftState:
    """State of the three triggers.

    reference : the last snapshots without a change, the newest last; at least one.
    last : the previous snapshot, changed or not.
    """

    reference: tuple[ReferenceSnapshot, ...]
    last: ReferenceSnapshot
    shift: JitterHistory = field(default_factory=JitterHistory)
    round_trips: JitterHistory = field(default_factory=JitterHistory)
    displacement: JitterHistory = field(default_factory=JitterHistory)


def make_connectivity(peers: tuple[str, ...], filtration: Filtration) -> ConnectivitySnapshot:
    """Add the merge tree. Raises `ValueError` unless there is one distinct peer per node."""
    if len(peers) != len(filtration) or len(set(peers)) != len(peers):
        raise ValueError(f"{len(filtration)} nodes need as many different peers")
    return ConnectivitySnapshot(peers, filtration, merge_tree(filtration))


def judge_shift(
    state: ShiftState | None, now: ConnectivitySnapshot, sensitivity: Sensitivity
) -> tuple[ShiftState, tuple[Trigger, ...]]:
    """Compare `now` with the reference; returns the next state and three triggers.

    The figures are mean absolute differences over the nodes that are in all snapshots of the
    reference and in `now`, relative to the median round trip: of the cophenetic matrices, of the
    round trips, and of the median change per node. The reference's value of a pair is the median
    over its snapshots, since a single one has as much jitter as `now`. Persistence diagrams would
    not do: they do not identify nodes. Departures are not seen here.

    When a trigger fires, `now` becomes the reference. A snapshot above no threshold joins it; one
    with an undecided figure does not, so that a beginning event stays out of the reference.
    """
    remembered = _make_reference(now)
    reference = state.reference if state else (remembered,)
    old = state or ShiftState(reference, remembered)
    cap = sensitivity.unreachable * reference[-1].median_rtt
    shift, shifted = judge_jitter(
        old.shift,
        "shift",
        _merge_tree_shift(reference, remembered, cap) / reference[-1].median_rtt,
        sensitivity,
        "nodes connect at scales that differ by {} of the median round trip",
    )
    trips, moved = judge_jitter(
        old.round_trips,
        "round trips",
        _mean_rtt_change(reference, now, remembered.index_of) / reference[-1].median_rtt,
        sensitivity,
        "round trips differ by {} of their median",
    )
    places, displaced = judge_jitter(
        old.displacement,
        "places",
        _mean_displacement(_lasting_rtt_change(reference, old.last, remembered))
        / reference[-1].median_rtt,
        replace(sensitivity, in_a_row=1),  # the figure compares two snapshots already
        "most of a node's round trips differ, twice in a row, by {} of the median",
    )
    found = (shifted, moved, displaced)
    if state is None:  # the snapshot was compared with itself
        return old, found
    if any(trigger.fired for trigger in found):
        calm = (
            JitterHistory(shift.calm_figures),
            JitterHistory(trips.calm_figures),
            JitterHistory(places.calm_figures),
        )
        return ShiftState((remembered,), remembered, *calm), found
    if not shift.pending and not trips.pending and not places.pending:
        reference = (*reference, remembered)[-sensitivity.reference :]
    return ShiftState(reference, remembered, shift, trips, places), found


def _make_reference(now: ConnectivitySnapshot) -> ReferenceSnapshot:
    count = len(now.peers)
    sample = np.unique(np.linspace(0, count - 1, min(count, _MAX_SAMPLED_NODES)).astype(np.int64))
    return ReferenceSnapshot(
        {peer: index for index, peer in enumerate(now.peers)},
        now.tree,
        now.filtration.median_weight() or float(np.finfo(np.float64).tiny),
        {now.peers[node]: index for index, node in enumerate(sample.tolist())},
        now.filtration.weight_NN[np.ix_(sample, sample)].astype(np.float32),
    )


def _merge_tree_shift(
    reference: tuple[ReferenceSnapshot, ...], now: ReferenceSnapshot, cap: float
) -> float:
    """Mean difference of cophenetic heights, among at most 500 common nodes."""
    common = sorted(set(now.index_of).intersection(*(old.index_of for old in reference)))
    peers = common[:: -(-len(common) // _MAX_COMPARED_NODES) or 1]
    nodes_KC = np.array(
        [[old.index_of[peer] for peer in peers] for old in reference], dtype=np.int64
    )
    now_C = np.array([now.index_of[peer] for peer in peers], dtype=np.int64)
    return mean_difference([old.tree for old in reference], nodes_KC, now.tree, now_C, cap=cap)


def _mean_rtt_change(
    reference: tuple[ReferenceSnapshot, ...], now: ConnectivitySnapshot, place: dict[str, int]
) -> float:
    """Mean change of round trips; each is capped at the median, so that few spikes count little."""
    common = set(place).intersection(*(old.sampled for old in reference))
    if len(common) < 2:
        return 0.0
    peers = sorted(common)
    before = []
    for old in reference:
        nodes = np.array([old.sampled[peer] for peer in peers])
        before.append(old.weight_SS[np.ix_(nodes, nodes)].astype(np.float64))
    nodes = np.array([place[peer] for peer in peers])
    after_CC = now.filtration.weight_NN[np.ix_(nodes, nodes)]
    median_CC = np.median(before, axis=0)
    both = np.isinf(after_CC) & np.isinf(median_CC)
    away_CC = np.abs(np.where(both, 0.0, after_CC) - np.where(both, 0.0, median_CC))
    np.fill_diagonal(away_CC, 0.0)
    moved = np.minimum(away_CC, reference[-1].median_rtt).sum()
    return float(moved) / (len(peers) * (len(peers) - 1))


def _lasting_rtt_change(
    reference: tuple[ReferenceSnapshot, ...], last: ReferenceSnapshot, now: ReferenceSnapshot
) -> Floats:
    """Lasting change of each round trip, [C, C] float64, negative if shorter.

    The smaller of the changes in the last two snapshots if both have the same sign, else 0, less
    the variation in the snapshots before. Capped at the median round trip, so that few spikes count
    little.
    """
    earlier = [old for old in reference if old is not last] or [last]
    peers = sorted(set(now.sampled).intersection(last.sampled, *(old.sampled for old in earlier)))
    unit = reference[-1].median_rtt
    before_KCC = np.stack([_sampled_rtts(old, peers) for old in earlier])
    usual_CC = np.median(before_KCC, axis=0)
    one_CC, other_CC = (
        _clipped_rtt_change(_sampled_rtts(each, peers), usual_CC, unit) for each in (last, now)
    )
    lasting_CC = np.minimum(np.abs(one_CC), np.abs(other_CC))
    lasting_CC[one_CC * other_CC < 0.0] = 0.0
    varied_KCC = np.abs(
        np.stack([_clipped_rtt_change(each, usual_CC, unit) for each in before_KCC])
    )
    lasting_CC = np.maximum(lasting_CC - varied_KCC.max(axis=0), 0.0)
    np.fill_diagonal(lasting_CC, 0.0)
    signed_CC: Floats = np.copysign(lasting_CC, other_CC)
    return signed_CC


def _mean_displacement(away_CC: Floats) -> float:
    """Mean over nodes of the absolute median change of a node's round trips."""
    count = len(away_CC)
    if count < 3:
        return 0.0
    others_CC = away_CC[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    return float(np.abs(np.median(others_CC, axis=1)).mean())


def _sampled_rtts(remembered: ReferenceSnapshot, peers: Sequence[str]) -> Floats:
    """Round trips among `peers`, all of them sampled, [C, C] float64."""
    nodes = np.array([remembered.sampled[peer] for peer in peers], dtype=np.int64)
    weight_CC: Floats = remembered.weight_SS[np.ix_(nodes, nodes)].astype(np.float64)
    return weight_CC


def _clipped_rtt_change(seconds_CC: Floats, before_CC: Floats, most: float) -> Floats:
    """Change of each round trip, [C, C] float64, clipped to [-`most`, `most`]."""
    both = np.isinf(seconds_CC) & np.isinf(before_CC)
    longer_CC = np.where(both, 0.0, seconds_CC) - np.where(both, 0.0, before_CC)
    clipped_CC: Floats = np.clip(longer_CC, -most, most)
    return clipped_CC
