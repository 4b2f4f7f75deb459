"""Notices for the tests of this folder."""

from __future__ import annotations

from typing import Any

from nesa_node.swarm.dht.adapter_notices import AdapterNotice, ListedAdapter
from nesa_node.swarm.dht.pool_notices import (
    AssignedSpan,
    BuildRequest,
    HeldModel,
    MachineAssignment,
    MeasuredFigures,
    Offer,
    PoolStatus,
    SwarmStatus,
    WantedSwarm,
)
from nesa_node.swarm.dht.sealing import (
    AnnouncedMove,
    EvidenceNotice,
    FailureReport,
    Lease,
    ListedContradiction,
    Notice,
    PlacementNotice,
    ReportedFailure,
    SignedSeal,
)
from nesa_node.swarm.dht.training_notices import SessionPlan, TrainingNotice
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.record_fields import MODEL_ID

PEERS = tuple(f"12D3KooW{letter * 44}" for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ")


def listed_adapter(**changes: Any) -> ListedAdapter:
    fields: dict[str, Any] = {
        "name": "polite",
        "digest": "0f" * 32,
        "nbytes": 5 * 10**6,
        "rank": 16,
        "target_modules": ("q_proj", "v_proj"),
        "metrics": {"eval_loss": 1.25},
        "created_at": 1_700_000_000.0,
        "description": "answers politely",
    }
    return ListedAdapter.model_validate({**fields, **changes})


def session_plan(**changes: Any) -> SessionPlan:
    fields: dict[str, Any] = {
        "session": "ab" * 16,
        "spec": "0f" * 32,
        "objective": "cross entropy of next tokens",
        "data": "1e" * 32,
        "max_tokens": 2048,
        "checkpoint_every": 20,
        "replicas": 2,
        "zero_stage": 1,
        "average_every": 1,
    }
    return SessionPlan.model_validate({**fields, **changes})


def listed_contradiction(**changes: Any) -> ListedContradiction:
    seal = SignedSeal(statement=b"statement", signature=bytes(64))
    fields: dict[str, Any] = {"accused": PEERS[4], "seals": (seal, seal)}
    return ListedContradiction.model_validate({**fields, **changes})


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
    Offer: {
        "device": "NVIDIA GeForce RTX 3090",
        "device_type": "cuda",
        "memory_total_bytes": 20 * 10**9,
        "memory_free_bytes": 8 * 10**9,
        "figures": {
            "bfloat16": MeasuredFigures(
                block_overhead_s=3e-4, read_bytes_per_s=8e11, flop_per_s=5e13, overlaps=True
            )
        },
        "models": ("org/*",),
        "obeys": (PEERS[2],),
        "held": (
            HeldModel(model="org/one", state="serving", span=(0, 10), node=PEERS[3]),
            HeldModel(model="two", state="refused", span=(0, 4), reason="the disk is full"),
        ),
    },
    MachineAssignment: {
        "spans": (AssignedSpan(model="org/one", span=(0, 10), cache_tokens=8192),),
    },
    BuildRequest: {
        "swarms": (WantedSwarm(model="org/one", replicas=2, max_replicas=3, until=2e9),),
    },
    PoolStatus: {
        "creators": (PEERS[0],),
        "machines": 6,
        "free_machines": 2,
        "swarms": (
            SwarmStatus(model="org/one", state="serving", replicas=1, wanted=2, machines=4),
        ),
    },
    AdapterNotice: {"adapters": (listed_adapter(),)},
    TrainingNotice: {"plans": (session_plan(),)},
    EvidenceNotice: {"contradictions": (listed_contradiction(),)},
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
