"""Repair of holes: which nodes move to blocks that have lost all holders.

Each node computes the same plan from the same records; a node moves if the plan names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.sharding.choose_span import choose_span
from nesa_node.topology.snapshot import NodeState, Snapshot, count_holders


def unheld_blocks(snapshot: Snapshot) -> frozenset[int]:
    """The blocks that no node serves or loads."""
    counts = count_holders((*snapshot.nodes, *snapshot.joining), snapshot.num_blocks)
    return frozenset(block for block, count in enumerate(counts) if not count)


def is_covered_without(snapshot: Snapshot, peer_id: PeerId, span: Span) -> bool:
    """Whether each block of `span` is served by a node other than `peer_id`."""
    counts = snapshot.without_peers(peer_id).coverage()
    return all(counts[block] for block in range(span.start, span.end))


def plan_repairs(snapshot: Snapshot, blocks: Collection[int]) -> Mapping[PeerId, Span]:
    """The moves after which `blocks`, which have no holder, are held again.

    Only movable nodes move, and only if all their blocks keep a serving holder after the moves
    before. The node that leaves the most replicas behind moves first, then the lower peer id. Each
    takes as many blocks as it holds, at the span that `choose_span` gives a joining node. The
    result depends on the records alone, not on their order.
    """
    serving = sorted(snapshot.nodes, key=lambda node: node.peer_id)
    joining = sorted(snapshot.joining, key=lambda node: node.peer_id)
    movers: dict[PeerId, Span] = {}
    while True:
        counts = count_holders(serving, snapshot.num_blocks)
        left = set(blocks) & unheld_blocks(
            replace(snapshot, nodes=tuple(serving), joining=tuple(joining))
        )
        mover = _most_replicated([node for node in serving if node.movable], counts)
        if not left or mover is None:
            return movers
        serving.remove(mover)
        seen = replace(snapshot, nodes=tuple(serving), joining=tuple(joining))
        span = choose_span(seen, len(mover.span))
        if left.isdisjoint(range(span.start, span.end)):
            # Holes outside `wanted` would be filled first; those are not due yet.
            return movers
        joining.append(replace(mover, span=span))
        movers[mover.peer_id] = span


def _most_replicated(nodes: Sequence[NodeState], counts: Sequence[int]) -> NodeState | None:
    def replicas(node: NodeState) -> int:
        return min(counts[node.span.start : node.span.end], default=0)

    best = max(map(replicas, nodes), default=0)
    if best < 2:
        return None
    return next(node for node in nodes if replicas(node) == best)
