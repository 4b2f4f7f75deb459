"""A swarm as far as its nodes' claims are believed, by those who plan for it or judge plans."""

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
    """Nobody here computes with others, so that what clients measured decides: they report it.

    `claims` remembers it for as long as if it had been measured here. Not for two threads.
    """

    def __init__(self, directory: DirectoryLike, claims: Claims) -> None:
        self._directory = directory
        self._claims = claims

    def of(self, snapshot: Snapshot) -> Snapshot:
        """`snapshot` with speeds that can be believed."""
        doubts = self._directory.doubts(snapshot.model_id)
        everyone = (*snapshot.nodes, *snapshot.joining)
        for node in everyone:
            self._claims.reported(node, doubts.get(node.peer_id, 0.0))
        nodes, joining = (
            tuple(map(self._claims.believed, each)) for each in (snapshot.nodes, snapshot.joining)
        )
        return replace(snapshot, nodes=nodes, joining=joining)
