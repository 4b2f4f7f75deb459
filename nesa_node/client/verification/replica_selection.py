"""Which nodes compute the same blocks, for sessions whose nodes check each other."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.snapshot import NodeState

Replica = frozenset[PeerId]
"""Nodes that compute blocks together: one, or those of a chain."""


@dataclass(frozen=True, slots=True)
class ReplicatedSpan:
    """Consecutive blocks, and replicas that compute them in the same dtype and quantization."""

    span: Span
    replicas: tuple[Replica, ...]
    """They share no node. In random order: the first ones compute, the next ones replace them."""


def choose_replicas(
    nodes: Iterable[NodeState],
    span: Span,
    copies: int,
    *,
    avoided: Collection[PeerId] = (),
) -> list[ReplicatedSpan]:
    """Cut `span` into as few parts as possible that at least `copies` nodes hold, each.

    Which of the nodes is chance: any that boasts of its speed would be among them otherwise. Raises
    `MissingBlocksError` for blocks that fewer nodes hold.
    """
    usable = [node for node in nodes if node.peer_id not in avoided and len(node.span)]
    cuts = {span.start, span.end}
    cuts.update(
        at
        for node in usable
        for at in (node.span.start, node.span.end)
        if span.start < at < span.end
    )

    @cache
    def holders(part: Span) -> tuple[PeerId, ...]:
        by_kind: dict[tuple[str, str], list[PeerId]] = defaultdict(list)
        for node in usable:
            if node.span.covers(part):
                by_kind[node.dtype, node.quantization].append(node.peer_id)
        return max(map(tuple, by_kind.values()), key=len, default=())

    ordered = sorted(cuts)
    missing = [
        (start, end) for start, end in pairwise(ordered) if len(holders(Span(start, end))) < copies
    ]
    if missing:
        start, end = missing[0]
        held = len(holders(Span(start, end)))
        raise MissingBlocksError(
            missing,
            f"{copies} nodes are to compute each block in the same dtype and quantization, and "
            f"{held} can be used for {start}:{end}: start more nodes with them, or leave --verify "
            "away",
        )
    best: dict[int, list[Span]] = {span.start: []}
    for end in ordered[1:]:
        ways = [
            [*best[start], Span(start, end)]
            for start in ordered
            if start in best and start < end and len(holders(Span(start, end))) >= copies
        ]
        best[end] = min(ways, key=len)
    chosen = []
    for part in best[span.end]:
        peers = list(holders(part))
        random.SystemRandom().shuffle(peers)
        chosen.append(ReplicatedSpan(part, tuple(frozenset({peer}) for peer in peers)))
    return chosen
