"""Choice of the span that a joining node should hold, and repair of holes.

A span is better than another when, in this order, it

1. covers more blocks without a holder;
2. leaves holes that fewer further nodes of this size can fill (so that the first node of an empty
   swarm takes `0:10` or `10:20` of 30 blocks and never `5:15`);
3. leaves the slowest blocks faster: the swarm's tokens/s per block (the sum over its holders),
   sorted from the slowest, is lexicographically greatest. This is water filling: replicas go to the
   bottleneck blocks.

Ties are broken by the caller's random generator.

To repair blocks that have lost all holders, each node computes the same plan from the same records;
a node moves if the plan names it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.predicted_speeds import predict_speeds
from nesa_node.topology.snapshot import NodeState, Snapshot, count_holders, zero_runs

# A node that has not measured itself still counts as a replica.
_UNMEASURED_TOKENS_PER_S = 1.0

SpanScore = tuple[int, int, tuple[float, ...]]


def choose_span(
    snapshot: Snapshot,
    num_blocks: int,
    *,
    rng: random.Random | None = None,
    tokens_per_s: float = _UNMEASURED_TOKENS_PER_S,
) -> Span:
    """The span of up to `num_blocks` blocks that `snapshot` needs most.

    Serving and joining nodes both count as holders. `tokens_per_s`: expected decode speed of the
    joining node. `rng` breaks ties (seeded with the peer id, it spreads nodes that start at once);
    without it the lowest start wins. Raises `ValueError` if the model or `num_blocks` is not
    positive.
    """
    ranked = _rank_spans(snapshot, num_blocks, tokens_per_s)
    best_score = max(score for score, _ in ranked)
    best = [span for score, span in ranked if score == best_score]
    return best[0] if rng is None else rng.choice(best)


def reconsider_span(
    snapshot: Snapshot,
    peer_id: PeerId,
    span: Span,
    *,
    rng: random.Random | None = None,
    tokens_per_s: float = _UNMEASURED_TOKENS_PER_S,
) -> Span:
    """The span to load once the nodes that join at the same time have announced their choice.

    A joining node yields only to joining nodes with a lower peer id. So the lowest keeps its span,
    the next chooses given the first, and the choice is stable after as many rounds as there are
    joining nodes. Returns `span` unless another is better.
    """
    rivals = tuple(node for node in snapshot.joining if node.peer_id < peer_id)
    seen = replace(snapshot.without_peers(peer_id), joining=rivals)
    ranked = _rank_spans(seen, len(span), tokens_per_s)
    current = next((score for score, candidate in ranked if candidate == span), None)
    if current is not None and current == max(score for score, _ in ranked):
        return span
    return choose_span(seen, len(span), rng=rng, tokens_per_s=tokens_per_s)


def _rank_spans(
    snapshot: Snapshot, num_blocks: int, tokens_per_s: float
) -> list[tuple[SpanScore, Span]]:
    if num_blocks < 1 or snapshot.num_blocks < 1:
        raise ValueError(f"cannot place {num_blocks} of {snapshot.num_blocks} blocks")
    width = min(num_blocks, snapshot.num_blocks)
    speeds = _tokens_per_s_by_block(snapshot)
    starts = range(snapshot.num_blocks - width + 1)
    spans = [Span(start, start + width) for start in starts]
    return [(_score_span(speeds, span, max(tokens_per_s, 1e-6)), span) for span in spans]


def _score_span(speeds: Sequence[float], span: Span, tokens_per_s: float) -> SpanScore:
    after = [
        speed + tokens_per_s if span.start <= block < span.end else speed
        for block, speed in enumerate(speeds)
    ]
    newly_covered = sum(speeds[block] == 0 for block in range(span.start, span.end))
    still_needed = sum(-(-len(hole) // len(span)) for hole in zero_runs(after))
    return newly_covered, -still_needed, tuple(sorted(after))


def _tokens_per_s_by_block(snapshot: Snapshot) -> tuple[float, ...]:
    speeds = [0.0] * snapshot.num_blocks
    for node in predict_speeds((*snapshot.nodes, *snapshot.joining)):
        speed = node.decode_tokens_per_s or _UNMEASURED_TOKENS_PER_S
        for block in range(node.span.start, min(node.span.end, snapshot.num_blocks)):
            speeds[block] += speed
    return tuple(speeds)


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
