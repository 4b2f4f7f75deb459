"""History entries of an orchestrator, small enough to keep thousands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from nesa_node.topology.changes.triggers import Trigger

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
    """One observation of the swarm and the decision made on it.

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
