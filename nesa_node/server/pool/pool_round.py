"""What one round of a pool's orchestrator sees and decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.dht.pool_notices import AssignedSpan, HeldModel, Offer, WantedSwarm
from nesa_node.topology.shape.failure_domains import DeclaredDomain, declared_domains
from nesa_node.topology.snapshot import NodeState, Snapshot


@dataclass(slots=True)
class PoolRound:
    """`assigned` is by machine and model; `wanted`, `snapshots`, `reasons` are by model."""

    offers: dict[PeerId, Offer]
    disobedient: int
    """Machines on offer that obey other orchestrators only."""
    wanted: dict[str, WantedSwarm]
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    assigned: dict[PeerId, dict[str, AssignedSpan]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def holders(self, name: str) -> dict[PeerId, AssignedSpan]:
        """The spans of a model that machines hold, or are to hold."""
        return {peer: spans[name] for peer, spans in self.assigned.items() if name in spans}

    def holder_domains(self, name: str, span: Span) -> list[frozenset[DeclaredDomain]]:
        """The declared failure domains of each machine that holds blocks of `span`."""
        return [
            declared_domains(self.offers[peer].addresses, self.offers[peer].operator)
            for peer, each in self.holders(name).items()
            if each.blocks.overlaps(span)
        ]

    def serving_nodes(self, name: str) -> dict[PeerId, tuple[HeldModel, NodeState]]:
        """What machines say that they serve of a model, with their nodes, where these are seen to.

        A node that several machines claim is that of the first.
        """
        snapshot = self.snapshots.get(name)
        nodes = {} if snapshot is None else {node.peer_id: node for node in snapshot.nodes}
        found = {}
        for peer, offer in self.offers.items():
            for held in offer.held:
                if held.model == name and held.state == "serving" and held.node in nodes:
                    found[peer] = held, nodes.pop(PeerId(held.node))
        return found

    def is_releasing(self) -> bool:
        """Whether a machine still holds what it was told to give back: its memory is free soon."""
        return any(
            each.takes_memory and each.model not in self.assigned[peer]
            for peer, offer in self.offers.items()
            for each in offer.held
        )

    def leaving(self) -> list[str]:
        """Models of removed swarms that machines still hold."""
        held = (each for offer in self.offers.values() for each in offer.held)
        models = {each.model for each in held if each.state != "refused"}
        return sorted(models - self.wanted.keys())
