"""Choice of the span that a joining node should hold.

A span is better than another when, in this order, it

1. covers more blocks without a holder;
2. leaves holes that fewer further nodes of this size can fill (so that the first node of an empty
   swarm takes `0:10` or `10:20` of 30 blocks and never `5:15`);
3. leaves the slowest blocks faster: the swarm's tokens/s per block (the sum over its holders),
   sorted from the slowest, is lexicographically greatest. This is water filling: replicas go to the
   bottleneck blocks.

Ties are broken by the caller's random generator.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.topology.snapshot import Snapshot, zero_runs

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
    for node in (*snapshot.nodes, *snapshot.joining):
        speed = node.decode_tokens_per_s or _UNMEASURED_TOKENS_PER_S
        for block in range(node.span.start, min(node.span.end, snapshot.num_blocks)):
            speeds[block] += speed
    return tuple(speeds)
