"""Who should hold something else when blocks have lost all their holders.

Each node computes this for itself, from the same records: whoever it names moves, all others stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.sharding.choose_span import choose_span
from nesa_node.topology.snapshot import NodeState, Snapshot, count_holders


def unheld(snapshot: Snapshot) -> frozenset[int]:
    """The blocks that nobody serves or loads."""
    counts = count_holders((*snapshot.nodes, *snapshot.joining), snapshot.num_blocks)
    return frozenset(block for block, count in enumerate(counts) if not count)


def is_spared(snapshot: Snapshot, peer_id: PeerId, span: Span) -> bool:
    """Whether each block of `span` is served by somebody beside `peer_id`."""
    counts = snapshot.without(peer_id).coverage()
    return all(counts[block] for block in range(span.start, span.end))


def plan_repairs(snapshot: Snapshot, wanted: Collection[int]) -> Mapping[PeerId, Span]:
    """Who moves where, so that the blocks `wanted`, which nobody holds, are held again.

    Only nodes that say they may move, and whose blocks others serve, also after the moves before.
    Whoever leaves the most replicas behind goes first; of equal ones, the lowest peer id. Each
    takes as many blocks as it holds, where `choose_span` puts a newcomer. The result depends on the
    records alone and not on their order.
    """
    serving = sorted(snapshot.nodes, key=lambda node: node.peer_id)
    joining = sorted(snapshot.joining, key=lambda node: node.peer_id)
    movers: dict[PeerId, Span] = {}
    while True:
        counts = count_holders(serving, snapshot.num_blocks)
        left = set(wanted) & unheld(replace(snapshot, nodes=tuple(serving), joining=tuple(joining)))
        mover = _most_spared([node for node in serving if node.movable], counts)
        if not left or mover is None:
            return movers
        serving.remove(mover)
        seen = replace(snapshot, nodes=tuple(serving), joining=tuple(joining))
        span = choose_span(seen, len(mover.span))
        if left.isdisjoint(range(span.start, span.end)):
            # Holes that are not to be filled yet come first.
            return movers
        joining.append(replace(mover, span=span))
        movers[mover.peer_id] = span


def _most_spared(nodes: Sequence[NodeState], counts: Sequence[int]) -> NodeState | None:
    def replicas(node: NodeState) -> int:
        return min(counts[node.span.start : node.span.end], default=0)

    best = max(map(replicas, nodes), default=0)
    if best < 2:
        return None
    return next(node for node in nodes if replicas(node) == best)
