"""Seals of sessions that never were, for tests of evidence."""

from __future__ import annotations

from typing import Any

from nesa_node.swarm.evidence import Proof, find_proof
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import Computation
from nesa_node.swarm.protocol.seal_messages import Seal, SealedRow, SealStatement, sign_seal


def make_seal(identity: Identity, *, root: bytes = b"r", count: int = 1, **changes: Any) -> Seal:
    """A node's seal of `count` rows of 32 tokens, whose roots are all `root`."""
    fields: dict[str, Any] = {
        "version": 1,
        "node": identity.peer_id,
        "session": bytes(16),
        "nonce": bytes(16),
        "epoch": 1,
        "number": 1,
        "blocks": (0, 10),
        "computation": Computation("float32", "none", "cpu"),
        "rows": (SealedRow(32, root * 32, root * 32),) * count,
        "cuts": 1,
        **changes,
    }
    return sign_seal(identity, SealStatement(**fields))


def make_proof(identity: Identity, **changes: Any) -> Proof:
    """Two seals of a node that contradict each other."""
    seals = (make_seal(identity, **changes), make_seal(identity, root=b"s", **changes))
    proof = find_proof(identity.peer_id, seals)
    assert proof is not None
    return proof
