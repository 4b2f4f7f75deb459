"""Triggers of the change detector: results, thresholds, and entries of an orchestrator's history.

The threshold of a figure adapts: 1.5 x the 95th percentile of its past, twice in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

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
