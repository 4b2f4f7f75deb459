"""Records for the tests of this folder."""

from __future__ import annotations

from typing import Any

from nesa_node.swarm.dht.records import NodeRecord, NodeStatus
from nesa_node.swarm.p2p.identity import Identity

MODEL_ID = "tiny@0123456789abcdef"


def make_status(**changes: Any) -> NodeStatus:
    fields: dict[str, Any] = {
        "state": "serving",
        "model_id": MODEL_ID,
        "model_name": "tiny",
        "num_blocks": 30,
        "span": (0, 10),
        "dtype": "float32",
        "protocol_version": (1, 0),
        "decode_tokens_per_s": 5.0,
        "free_cache_tokens": 1000,
        "total_cache_tokens": 2000,
    }
    return NodeStatus.model_validate({**fields, **changes})


def make_record(identity: Identity, now: float, **changes: Any) -> NodeRecord:
    own = {"peer_id", "seq", "issued_at", "expires_at", "addresses", "shard_level"}
    status = make_status(**{key: changes[key] for key in changes.keys() - own})
    fields: dict[str, Any] = {
        **status.model_dump(),
        "peer_id": identity.peer_id,
        "seq": 1,
        "issued_at": now,
        "expires_at": now + 60.0,
        "addresses": (f"/ip4/127.0.0.1/tcp/31330/p2p/{identity.peer_id}",),
        **{key: changes[key] for key in changes.keys() & own},
    }
    return NodeRecord.model_validate(fields)
