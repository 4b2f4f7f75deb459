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


def choose_chains(
    nodes: Iterable[NodeState], span: Span, fewest: int, *, avoided: Collection[PeerId] = ()
) -> ReplicatedSpan:
    """Divide nodes among as many chains over `span` as can be, all of one dtype and quantization.

    As many as hold the block that fewest hold: in the order of first blocks, each node goes to the
    chain that reaches least far. A block that this many nodes hold is then in each chain, since a
    chain gets a second one of them only once all have one. Which chain gets which of several nodes
    is chance, as in `choose_replicas`. Nodes that no chain needs are in one all the same, which may
    use them. Raises `MissingBlocksError` for blocks for which there are not even `fewest` chains.
    """
    by_kind: dict[tuple[str, str, str], list[NodeState]] = defaultdict(list)
    for node in nodes:
        is_within = node.span.start < span.end and span.start < node.span.end
        if is_within and node.peer_id not in avoided:
            by_kind[node.kind].append(node)
    usable = max(by_kind.values(), key=lambda kind: min(_count_holders(kind, span)), default=[])
    held = _count_holders(usable, span)
    if min(held) < fewest:
        missing = [(at, at + 1) for at, count in enumerate(held, span.start) if count < fewest]
        raise MissingBlocksError(
            missing,
            f"at least {fewest} chains without a common node are to compute the model in the same "
            f"dtype and quantization, and {min(held)} nodes can be used for block "
            f"{span.start + held.index(min(held))}: start more nodes with it, or leave --verify "
            "away",
        )
    random.SystemRandom().shuffle(usable)
    chains: list[list[PeerId]] = [[] for _ in range(min(held))]
    reached = [span.start] * len(chains)
    for node in sorted(usable, key=lambda node: node.span.start):
        at = reached.index(min(reached))
        chains[at].append(node.peer_id)
        reached[at] = max(reached[at], node.span.end)
    random.SystemRandom().shuffle(chains)
    return ReplicatedSpan(span, tuple(map(frozenset, chains)))


def _count_holders(nodes: Iterable[NodeState], span: Span) -> list[int]:
    """How many nodes hold each block of `span`."""
    counts = [0] * len(span)
    for node in nodes:
        for block in range(max(node.span.start, span.start), min(node.span.end, span.end)):
            counts[block - span.start] += 1
    return counts


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
        by_kind: dict[tuple[str, str, str], list[PeerId]] = defaultdict(list)
        for node in usable:
            if node.span.covers(part):
                by_kind[node.kind].append(node.peer_id)
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
