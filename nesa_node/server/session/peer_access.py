"""Which peers a node answers on streams that are no sessions."""

from __future__ import annotations

from dataclasses import dataclass

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import verify_adapter_proof


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Peers of the node's swarm that ask for its model, and that its operator serves."""

    swarm: Swarm
    model_id: ModelId
    allow: frozenset[PeerId]
    """Empty: all."""
    deny: frozenset[PeerId]

    def require(self, peer: PeerId, membership: bytes, model: str) -> None:
        """Raise `ProtocolError` for a peer that is not served, or asks for another model.

        `membership` is its proof that it knows the key of a private swarm (`adapter_proof`).
        """
        if peer in self.deny or (self.allow and peer not in self.allow):
            raise ProtocolError("not_allowed", "this node does not serve this peer")
        own = self.swarm.identity.peer_id
        if not verify_adapter_proof(self.swarm.notices.membership, membership, peer, own):
            raise ProtocolError("not_a_member", "the swarm keys of this node and its peer differ")
        if model != self.model_id:
            raise ProtocolError("wrong_model", f"this node serves {self.model_id}")
