"""Change detection over consecutive snapshots."""

from __future__ import annotations

import numpy as np

from nesa_node.topology.changes.detector import (
    ChangeReport,
    ChangeState,
    Observation,
    PlanCosts,
    observe,
)
from nesa_node.topology.changes.membership import Holdings
from nesa_node.topology.changes.shift import Connections, connections_of
from nesa_node.topology.changes.triggers import Sensitivity
from nesa_node.topology.homology.weights import round_trip_filtration
from nesa_node.topology.snapshot import Snapshot


class Watch:
    def __init__(self, sensitivity: Sensitivity) -> None:
        self._state = ChangeState(sensitivity=sensitivity)
        self._num_blocks = 0

    def observe(self, snapshot: Snapshot, plan: PlanCosts | None) -> ChangeReport:
        if snapshot.num_blocks != self._num_blocks:
            self._num_blocks = snapshot.num_blocks
            self._state = ChangeState(sensitivity=self._state.sensitivity)
        now = Observation(
            connections=_connections(snapshot), holdings=_holdings(snapshot), plan=plan
        )
        self._state, report = observe(self._state, now)
        return report


def _holdings(snapshot: Snapshot) -> Holdings:
    """Count announced spans of joining nodes too: a node that moves is no loss."""
    everyone = (*snapshot.nodes, *snapshot.joining)
    holders_B = np.zeros(snapshot.num_blocks, dtype=np.int64)
    for node in everyone:
        holders_B[node.span.start : node.span.end] += 1
    capacity = sum(node.decode_tokens_per_s * len(node.span) for node in everyone)
    return Holdings(tuple(holders_B.tolist()), capacity)


def _connections(snapshot: Snapshot) -> Connections:
    """Pairs without a measurement count as not connected."""
    peers = tuple(node.peer_id for node in snapshot.nodes)
    return connections_of(peers, round_trip_filtration(snapshot))
