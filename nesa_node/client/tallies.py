"""What the sessions of one connection have lived through, for whoever counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, get_args

from nesa_node.core import metric_names as names
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import Sample
from nesa_node.swarm.metrics import model_samples, swarm_samples
from nesa_node.swarm.node import Swarm

Reason = Literal["failed", "left", "slow"]


class SessionTallies:
    """Each session adds to it. On the connection's event loop."""

    def __init__(self) -> None:
        self.open = 0
        self.step_s = names.STEP.tally()
        self.recovery_s = names.RECOVERY.tally()
        self.failovers: Counter[Reason] = Counter()


def connection_samples(
    swarm: Swarm, model_id: ModelId, num_blocks: int, tallies: SessionTallies
) -> Iterator[Sample]:
    """What a client tells Prometheus of one connection; may be read in any thread."""
    model = (model_id,)
    yield Sample(names.SESSIONS, model, tallies.open)
    yield Sample(names.STEP, model, tallies.step_s)
    yield Sample(names.RECOVERY, model, tallies.recovery_s)
    for reason in get_args(Reason):
        yield Sample(names.FAILOVERS, (*model, reason), tallies.failovers[reason])
    yield from swarm_samples(swarm)
    yield from model_samples(swarm.directory, model_id, num_blocks)
