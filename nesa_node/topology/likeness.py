"""Comparison of two snapshots of a swarm: nodes, spans, speeds and round trips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.topology.snapshot import NodeState, Snapshot

SPEED_CHANGED = 0.2
"""Relative change of a node's tokens/s that counts as a difference."""
WAYS_CHANGED = 0.05
"""Mean change of round trips, relative to their median, that counts as a difference. Pings alone
vary by about 2 %."""
_SAMPLED = 500


def differ(one: Snapshot, other: Snapshot) -> bool:
    """Whether nodes, spans, speeds or round trips differ.

    Loads, ages and free memory differ between any two snapshots and do not count.
    """
    return (
        one.num_blocks != other.num_blocks
        or _held(one.nodes) != _held(other.nodes)
        or _held(one.joining) != _held(other.joining)
        or _speeds_differ(one, other)
        or _ways_differ(one, other)
    )


def _held(nodes: Sequence[NodeState]) -> dict[PeerId, tuple[int, int, str]]:
    return {node.peer_id: (node.span.start, node.span.end, node.quantization) for node in nodes}


def _speeds_differ(one: Snapshot, other: Snapshot) -> bool:
    speed = {node.peer_id: node.decode_tokens_per_s for node in one.nodes}
    return any(
        abs(node.decode_tokens_per_s - speed[node.peer_id]) > SPEED_CHANGED * speed[node.peer_id]
        for node in other.nodes
    )


def _ways_differ(one: Snapshot, other: Snapshot) -> bool:
    """Whether round trips differ, among at most 500 nodes; each change is capped at the median."""
    if one.links is None or other.links is None:
        return (one.links is None) != (other.links is None)
    peers = [node.peer_id for node in one.nodes][:: -(-len(one.nodes) // _SAMPLED) or 1]
    before_NN, _ = one.links.between(peers)
    after_NN, _ = other.links.between(peers)
    known_NN = np.isfinite(before_NN) & np.isfinite(after_NN)
    if not np.array_equal(np.isfinite(before_NN), np.isfinite(after_NN)):
        return True
    np.fill_diagonal(known_NN, False)
    if not known_NN.any():
        return False
    unit = float(np.median(before_NN[known_NN]))
    away = np.minimum(np.abs(after_NN[known_NN] - before_NN[known_NN]), unit)
    return float(away.mean()) > WAYS_CHANGED * unit
