"""Metrics of the sessions of one connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, get_args

from nesa_node.client.suspicion import SuspicionEvent
from nesa_node.core import metric_names as names
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import Sample

Reason = Literal["failed", "left", "slow"]


class SessionTallies:
    """Counters that all sessions of a connection update, on its event loop."""

    def __init__(self) -> None:
        self.open = 0
        self.step_s = names.STEP.tally()
        self.recovery_s = names.RECOVERY.tally()
        self.failovers: Counter[Reason] = Counter()
        self.suspicions: Counter[SuspicionEvent] = Counter()
        """Suspicions by outcome: raised, then withdrawn or confirmed."""


def session_samples(model_id: ModelId, tallies: SessionTallies) -> Iterator[Sample]:
    """Prometheus samples of a client's sessions. Thread-safe."""
    model = (model_id,)
    yield Sample(names.SESSIONS, model, tallies.open)
    yield Sample(names.STEP, model, tallies.step_s)
    yield Sample(names.RECOVERY, model, tallies.recovery_s)
    for reason in get_args(Reason):
        yield Sample(names.FAILOVERS, (*model, reason), tallies.failovers[reason])
    for event in get_args(SuspicionEvent):
        yield Sample(names.SUSPICIONS, (*model, event), tallies.suspicions[event])
