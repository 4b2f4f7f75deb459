"""Snapshots with the nodes' claimed speeds limited to what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.routing.claims import Claims
from nesa_node.topology.snapshot import Snapshot


class DirectoryLike(Protocol):
    def doubts(self, model_id: ModelId) -> Mapping[PeerId, float]: ...


class Believed:
    """Clamps claimed speeds by the measurements that clients report.

    Neither planners nor followers compute with other nodes. `claims` remembers reports as long as
    own measurements. Not thread-safe.
    """

    def __init__(self, directory: DirectoryLike, claims: Claims) -> None:
        self._directory = directory
        self._claims = claims

    def of(self, snapshot: Snapshot) -> Snapshot:
        """`snapshot` with clamped speeds."""
        doubts = self._directory.doubts(snapshot.model_id)
        everyone = (*snapshot.nodes, *snapshot.joining)
        for node in everyone:
            self._claims.reported(node, doubts.get(node.peer_id, 0.0))
        nodes, joining = (
            tuple(map(self._claims.believed, each)) for each in (snapshot.nodes, snapshot.joining)
        )
        return replace(snapshot, nodes=nodes, joining=joining)
