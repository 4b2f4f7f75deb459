"""What every trigger answers with, and how easily each fires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """`figure` is what was seen, `threshold` what it has to exceed, `reason` both in words.

    `in_a_row` counts the snapshots, this one included, in which it did.
    """

    name: TriggerName
    fired: bool
    figure: float
    threshold: float
    in_a_row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Factors 1.5 and 1.1, the 95th percentile and two in a row are those of a prototype's traces.

    jitter_factor, jitter_percentile : of past shifts, which the next one has to exceed.
    in_a_row : snapshots that must agree before a shift or a better plan is believed.
    history : past shifts that are kept. With fewer than `least_history`, `first_threshold` counts.
    least_threshold : shifts below this share of the median round trip never count.
    reference : calm snapshots, the latest ones, that the next is compared with.
    unreachable : median round trips that a pair without any connection counts as.
    least_departed : smaller shares of nodes that leave at once never count.
    least_region : nodes that are a region, if they lie together.
    replicas_wanted : fewer holders of a block than this, and than before, are a loss.
    capacity_lost : the share of capacity whose loss counts.
    plan_gain : how many times the best plan's cost the current one's must be, to be looked into.
    plan_error : what predictions of that ratio are off by. To move, a gain must remain without it,
        in `move_in_a_row` snapshots.
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
