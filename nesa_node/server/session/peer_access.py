"""Which peers a node answers on streams that are no sessions."""

from __future__ import annotations

from dataclasses import dataclass

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import verify_adapter_proof


def require_peer(
    swarm: Swarm,
    peer: PeerId,
    membership: bytes,
    *,
    allow: frozenset[PeerId],
    deny: frozenset[PeerId],
) -> None:
    """Raise `ProtocolError` for a peer that the operator does not serve, or of another swarm.

    `membership` is its proof that it knows the key of a private swarm (`adapter_proof`). An empty
    `allow` allows all.
    """
    if peer in deny or (allow and peer not in allow):
        raise ProtocolError("not_allowed", "this node does not serve this peer")
    own = swarm.identity.peer_id
    if not verify_adapter_proof(swarm.notices.membership, membership, peer, own):
        raise ProtocolError("not_a_member", "the swarm keys of this node and its peer differ")


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Peers of the node's swarm that ask for its model, and that its operator serves."""

    swarm: Swarm
    model_id: ModelId
    allow: frozenset[PeerId]
    """Empty: all."""
    deny: frozenset[PeerId]

    def require(self, peer: PeerId, membership: bytes, model: str) -> None:
        """Raise as `require_peer` does, and for a peer that asks for another model."""
        require_peer(self.swarm, peer, membership, allow=self.allow, deny=self.deny)
        if model != self.model_id:
            raise ProtocolError("wrong_model", f"this node serves {self.model_id}")
