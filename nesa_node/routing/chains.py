"""The chain of nodes that a session uses: an exact shortest path over the blocks.

The cost of a chain is the estimated time of one decoded token::

    sum over hops of  hop_latency_s + penalty(peer) + blocks * (1 + load) / (tokens/s * len(span))

where a node's tokens/s is measured through its whole span. A hop may use a part of a node's span.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.topology.snapshot import NodeState, Snapshot, count_holders, zero_runs

HOP_LATENCY_S = 0.01
"""What a hop is assumed to cost beside its compute, until round trips are measured."""

_SLOWEST_TOKENS_PER_S = 0.1


@dataclass(frozen=True, slots=True)
class Hop:
    peer_id: PeerId
    span: Span


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a peer may be used for: one run inside `span`, across block boundary `via` if set."""

    peer_id: PeerId
    span: Span
    hop_s: float
    block_s: float
    via: int | None = None


def plan_chain(
    snapshot: Snapshot,
    span: Span,
    *,
    penalty: Callable[[PeerId], float] = lambda _: 0.0,
    exclude: frozenset[PeerId] = frozenset(),
    min_free_tokens: int = 0,
    hop_latency_s: float = HOP_LATENCY_S,
) -> tuple[Hop, ...]:
    """The cheapest chain that runs every block of `span` once, in order, and no peer twice.

    Peers in `exclude` and peers with fewer than `min_free_tokens` free cache tokens are not used.
    An empty span gives an empty chain. Raises `MissingBlocksError` with the ranges that no usable
    peer holds.

    The shortest path alone might leave a slow node for a fast one and come back. So the search is
    branch and bound: where the relaxed optimum visits a peer twice, parting at block boundary `m`,
    any allowed chain uses that peer before `m` only, after `m` only, or in one run across `m`; each
    of these three is searched with its own shortest path, cheapest first. The first chain without a
    repetition is optimal, since the cost of every open branch is a lower bound. One always exists:
    covering greedily by the furthest-reaching node never returns to a node. Equal costs are decided
    by fewer hops, then by lower peer ids.
    """
    usable = [
        node
        for node in snapshot.nodes
        if node.peer_id not in exclude and node.free_cache_tokens >= min_free_tokens
    ]
    _require_coverage(usable, span)
    offers = tuple(
        _offer(node, hop_latency_s + max(penalty(node.peer_id), 0.0))
        for node in sorted(usable, key=lambda node: node.peer_id)
    )
    order = itertools.count()
    branches: list[tuple[float, int, int, tuple[_Offer, ...], tuple[Hop, ...]]] = []

    def search(candidates: tuple[_Offer, ...]) -> None:
        found = _shortest(candidates, span)
        if found is not None:
            cost_s, hops = found
            heapq.heappush(branches, (cost_s, len(hops), next(order), candidates, hops))

    search(offers)
    while branches:
        _, _, _, candidates, hops = heapq.heappop(branches)
        twice = _first_repetition(hops)
        if twice is None:
            return hops
        for narrowed in _branch(candidates, *twice):
            search(narrowed)
    raise AssertionError("a covered span has a chain")


def chain_cost_s(
    snapshot: Snapshot,
    hops: Sequence[Hop],
    *,
    penalty: Callable[[PeerId], float] = lambda _: 0.0,
    hop_latency_s: float = HOP_LATENCY_S,
) -> float:
    """The cost, as `plan_chain` counts it, of `hops`. Raises `KeyError` for unknown peers."""
    nodes = {node.peer_id: node for node in snapshot.nodes}
    total_s = 0.0
    for hop in hops:
        offer = _offer(nodes[hop.peer_id], hop_latency_s + max(penalty(hop.peer_id), 0.0))
        total_s += offer.hop_s + len(hop.span) * offer.block_s
    return total_s


def _offer(node: NodeState, hop_s: float) -> _Offer:
    tokens_per_s = max(node.decode_tokens_per_s, _SLOWEST_TOKENS_PER_S)
    block_s = (1.0 + node.load) / (tokens_per_s * max(len(node.span), 1))
    return _Offer(node.peer_id, node.span, hop_s, block_s)


def _require_coverage(nodes: Sequence[NodeState], span: Span) -> None:
    counts = count_holders(nodes, span.end)[span.start :]
    missing = [(run.start + span.start, run.end + span.start) for run in zero_runs(counts)]
    if missing:
        ranges = ", ".join(f"{start}:{end}" for start, end in missing)
        raise MissingBlocksError(
            missing,
            f"no usable node holds blocks {ranges}; wait for one to join or start one with "
            f"`nesa-node run MODEL --block-indices {missing[0][0]}:{missing[0][1]}`",
        )


def _shortest(offers: Sequence[_Offer], span: Span) -> tuple[float, tuple[Hop, ...]] | None:
    """The cheapest path when a peer may be left and entered again: O(blocks x peers).

    `reached[b]` is the best way to have run all blocks before `b`; `running[i]` the best way to be
    inside offer `i` after the current block, with the boundary where that run began.
    """
    unreached = (math.inf, 0, -1, -1)
    reached = {span.start: (0.0, 0, -1, span.start)}
    running: list[tuple[float, int, int] | None] = [None] * len(offers)
    forced = [offer for offer in offers if offer.via is not None]
    for block in range(span.start, span.end):
        best = unreached
        for index, offer in enumerate(offers):
            running[index] = _advance(offer, block, running[index], reached, forced)
            state = running[index]
            if state is None or (offer.via is not None and block + 1 <= offer.via):
                continue
            best = min(best, (state[0], state[1], index, state[2]))
        if best[0] < math.inf:
            reached[block + 1] = best
    if span.end not in reached:
        return None
    hops: list[Hop] = []
    end = span.end
    while end > span.start:
        _, _, index, start = reached[end]
        hops.append(Hop(offers[index].peer_id, Span(start, end)))
        end = start
    return reached[span.end][0], tuple(reversed(hops))


def _advance(
    offer: _Offer,
    block: int,
    state: tuple[float, int, int] | None,
    reached: dict[int, tuple[float, int, int, int]],
    forced: Sequence[_Offer],
) -> tuple[float, int, int] | None:
    """Run `block` on `offer`, going on from `state` or entering here; None if neither can be."""
    if not offer.span.start <= block < offer.span.end:
        return None
    if any(
        other.via is not None and other is not offer and other.via - 1 <= block <= other.via
        for other in forced
    ):
        return None
    if block in reached and (offer.via is None or block < offer.via):
        cost_s, hops, _, _ = reached[block]
        entered = (cost_s + offer.hop_s, hops + 1, block)
        state = entered if state is None else min(state, entered)
    return None if state is None else (state[0] + offer.block_s, state[1], state[2])


def _first_repetition(hops: Sequence[Hop]) -> tuple[PeerId, int] | None:
    """A peer that occurs twice and the boundary at the end of its first run."""
    ends: dict[PeerId, int] = {}
    for hop in hops:
        if hop.peer_id in ends:
            return hop.peer_id, ends[hop.peer_id]
        ends[hop.peer_id] = hop.span.end
    return None


def _branch(offers: tuple[_Offer, ...], peer: PeerId, boundary: int) -> list[tuple[_Offer, ...]]:
    """The three ways to use `peer` at most once: before, after, or across `boundary`."""
    index = next(i for i, offer in enumerate(offers) if offer.peer_id == peer)
    old = offers[index]
    choices = (
        _Offer(peer, Span(old.span.start, boundary), old.hop_s, old.block_s),
        _Offer(peer, Span(boundary, old.span.end), old.hop_s, old.block_s),
        _Offer(peer, old.span, old.hop_s, old.block_s, via=boundary),
    )
    return [(*offers[:index], choice, *offers[index + 1 :]) for choice in choices]
