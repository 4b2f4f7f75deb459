"""Notices for the tests of this folder."""

from __future__ import annotations

from typing import Any

from nesa_node.swarm.dht.sealing import (
    AnnouncedMove,
    FailureReport,
    Lease,
    Notice,
    PlacementNotice,
    ReportedFailure,
)
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.record_fields import MODEL_ID

PEERS = tuple(f"12D3KooW{letter * 44}" for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ")

FIELDS: dict[type[Notice], dict[str, Any]] = {
    Lease: {"role": "leading"},
    PlacementNotice: {
        "num_blocks": 30,
        "based_on": "00ff",
        "moves": (AnnouncedMove(peer=PEERS[0], was=(0, 10), to=(10, 20), gain=0.2),),
        "gain": 0.2,
        "strategy": "exact-latency",
        "trigger": "plan",
        "reason": "the best plan is 1.2 times as good",
    },
    FailureReport: {"failures": ()},
}


def make_notice(kind: type[Notice], identity: Identity, now: float, **changes: Any) -> Notice:
    fields: dict[str, Any] = {
        "model_id": MODEL_ID,
        "peer_id": identity.peer_id,
        "epoch": 3,
        "seq": 1,
        "issued_at": now,
        "expires_at": now + 60.0,
        **FIELDS[kind],
        **changes,
    }
    if kind is FailureReport and "failures" not in changes:
        failure = ReportedFailure(peer=PEERS[1], kind="lost", count=1, at=fields["issued_at"] - 1)
        fields["failures"] = (failure,)
    return kind.model_validate(fields)
