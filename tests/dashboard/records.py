"""Records of made-up nodes, as a swarm would hold them."""

from __future__ import annotations

from typing import Any

from nesa_node.sharding.graph_plan import GraphPlan, PieceWork
from nesa_node.swarm.dht.records import NodeRecord

BLOCKS = 12
TTL_S = 30.0
MODEL = "tiny@1"


def record(
    peer: str, span: tuple[int, int] = (0, 4), *, at: float = 1000.0, **fields: Any
) -> NodeRecord:
    """Made at `at`, by a node that started 100 s before the epoch's thousandth second."""
    return NodeRecord.model_validate(
        {
            "peer_id": peer,
            "seq": int(at * 1000),
            "issued_at": at,
            "expires_at": at + TTL_S,
            "state": "serving",
            "model_id": MODEL,
            "model_name": "tiny",
            "num_blocks": BLOCKS,
            "span": span,
            "dtype": "float32",
            "protocol_version": (1, 0),
            "uptime_s": at - 900,
        }
        | fields
    )


def plan(work: tuple[PieceWork, ...] = ()) -> GraphPlan:
    """Of a network in two pieces."""
    return GraphPlan(
        graph="0" * 64,
        dtype="float32",
        batch=1,
        tokens=8,
        image_size=None,
        made_with={},
        pieces=((0, 1), (2,)),
        work=work,
    )
