"""How many replicas the load of a built swarm asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht.pool_notices import WantedSwarm
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

BUSY_LOAD = 0.7
IDLE_LOAD = 0.15
"""Load of a swarm's busiest block above which it gets a replica, below which it gives one back."""
BUSY_S = 20.0
IDLE_S = 300.0
"""Times for which a swarm must be busy, or idle: a replica that is built again is loaded again."""


@dataclass(slots=True)
class Demand:
    """Replicas that a swarm's load asks for, within the limits of what is wanted."""

    wanted: WantedSwarm
    replicas: int
    load: float = 0.0
    _steady_since: float = 0.0
    """Since when the load has been in the present one of the three ranges."""

    def update(self, wanted: WantedSwarm, snapshot: Snapshot | None, now: float) -> None:
        """Adapt the replicas to the load of the swarm's nodes at `now`, in monotonic seconds."""
        self.wanted = wanted
        self.replicas = min(max(self.replicas, wanted.replicas), wanted.max_replicas)
        before, self.load = _range(self.load), 0.0 if snapshot is None else busiest_load(snapshot)
        if _range(self.load) != before or not self._steady_since:
            self._steady_since = now
        if self.load > BUSY_LOAD and now - self._steady_since >= BUSY_S:
            self._change(1, now)
        elif self.load < IDLE_LOAD and now - self._steady_since >= IDLE_S:
            self._change(-1, now)

    def can_give_back(self) -> bool:
        """Whether one replica less would leave the swarm within its limits, and not busy."""
        rest = self.replicas - 1
        return rest >= self.wanted.replicas and self.load * self.replicas <= BUSY_LOAD * rest

    def give_back(self, now: float) -> None:
        """Give a replica back, to a swarm that is busy."""
        self._change(-1, now)

    def _change(self, step: int, now: float) -> None:
        replicas = self.replicas + step
        if self.wanted.replicas <= replicas <= self.wanted.max_replicas:
            self.replicas, self._steady_since = replicas, now
            event = "replica_wanted" if step > 0 else "replica_given_back"
            log.info(event, model=self.wanted.model, replicas=replicas, load=round(self.load, 2))


def busiest_load(snapshot: Snapshot) -> float:
    """Mean load of the nodes of the block where it is highest: that block bounds the throughput."""
    load_B, holders_B = np.zeros(snapshot.num_blocks), np.zeros(snapshot.num_blocks)
    for node in snapshot.nodes:
        load_B[node.span.start : node.span.end] += node.load
        holders_B[node.span.start : node.span.end] += 1
    return float(np.max(load_B / np.maximum(holders_B, 1), initial=0.0))


def least_busy(demands: Mapping[str, Demand]) -> Demand | None:
    """The swarm that can best do with a replica less; None if each needs all it has."""
    able = [each for each in demands.values() if each.can_give_back()]
    return min(able, key=lambda each: each.load, default=None)


def _range(load: float) -> int:
    return int(load >= IDLE_LOAD) + int(load > BUSY_LOAD)
