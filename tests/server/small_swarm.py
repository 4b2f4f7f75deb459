"""A swarm of four nodes and eight blocks, of known worth, and placements for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.server.orchestrator.placement_filter import PlacementFilter
from nesa_node.server.orchestrator.swarm_score import (
    SwarmScore,
)
from nesa_node.swarm.dht.sealing import AnnouncedMove, PlacementNotice
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.swarm.notice_fields import PEERS

MODEL = ModelId("tiny@0")
NOW = 1_800_000_000.0
BOSS, RIVAL, STRANGER = (PeerId(peer) for peer in PEERS[-3:])
ME, A, B, C = (PeerId(peer) for peer in PEERS[:4])
BLOCKS = 8


def appraise(snapshot: Snapshot) -> SwarmScore:
    """A step takes, block by block, as long as at the fastest holder; all holders work at once."""
    speeds: list[list[float]] = [[] for _ in range(snapshot.num_blocks)]
    for node in snapshot.nodes:
        for block in range(node.span.start, min(node.span.end, snapshot.num_blocks)):
            speeds[block].append(node.decode_tokens_per_s * len(node.span))
    holes = sum(not each for each in speeds)
    thin = sum(max(2 - len(each), 0) for each in speeds)
    if holes:
        return SwarmScore(holes, thin, float("inf"), 0.0, 0)
    return SwarmScore(0, thin, sum(1 / max(each) for each in speeds), min(map(sum, speeds)), 0)


def swarm(spans: Mapping[PeerId, tuple[int, int]], taken_at: float = NOW - 5) -> Snapshot:
    nodes = tuple(
        NodeState(peer, Span(*span), decode_tokens_per_s=10.0 / (span[1] - span[0]))
        for peer, span in spans.items()
    )
    return Snapshot(MODEL, BLOCKS, nodes, taken_at)


# Three hold the first half, one the second: whoever moves over doubles what the swarm can do.
UNEVEN = {ME: (0, 4), A: (0, 4), B: (0, 4), C: (4, 8)}
EVEN = {ME: (0, 4), A: (0, 4), B: (4, 8), C: (4, 8)}
TORN = {ME: (0, 4), A: (0, 4), B: (0, 4)}
TO_SECOND = ((ME, (0, 4), (4, 8)),)


def placement(
    *moves: tuple[PeerId, tuple[int, int], tuple[int, int]],
    signer: PeerId = STRANGER,
    **changes: Any,
) -> PlacementNotice:
    fields: dict[str, Any] = {
        "model_id": MODEL,
        "peer_id": signer,
        "epoch": 3,
        "seq": 1,
        "issued_at": NOW,
        "expires_at": NOW + 60,
        "num_blocks": BLOCKS,
        "based_on": "",
        "moves": tuple(AnnouncedMove(peer=p, was=was, to=to, gain=0.5) for p, was, to in moves),
        "gain": 0.5,
        "strategy": "test",
        "trigger": "gain",
        "reason": "a test",
    }
    return PlacementNotice.model_validate({**fields, **changes})


def node(*allowed: PeerId, max_blocks: int = 4, seen: Snapshot | None = None) -> PlacementFilter:
    obedience = PlacementFilter(
        ME, appraise, num_blocks=BLOCKS, max_blocks=max_blocks, allowed=frozenset(allowed)
    )
    if seen is not None:
        obedience.remember_snapshot(seen)
    return obedience
