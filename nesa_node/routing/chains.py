"""The chain of nodes that a live session uses: a snapshot in, hops out.

`build.py` says what the time of a step is made of, `strategies.py` how a chain is chosen by it; the
default is the shortest time that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.build import Request, build_problem, transfer_seconds
from nesa_node.routing.exact import exact_latency
from nesa_node.routing.minplus import missing_blocks
from nesa_node.routing.problem import Chain, Problem, Visit, terms
from nesa_node.topology.snapshot import Snapshot

Penalty = Callable[[PeerId], float]
Choose = Callable[[Problem], Chain]


@dataclass(frozen=True, slots=True)
class Hop:
    peer_id: PeerId
    span: Span


def no_penalty(_: PeerId) -> float:
    return 0.0


def plan_chain(
    snapshot: Snapshot,
    span: Span,
    *,
    penalty: Penalty = no_penalty,
    exclude: frozenset[PeerId] = frozenset(),
    min_free_tokens: int = 0,
    choose: Choose = exact_latency,
    entry_rtt_ms: Mapping[PeerId, float] | None = None,
    after: PeerId | None = None,
    before: PeerId | None = None,
) -> tuple[Hop, ...]:
    """The chain that `choose` (a strategy's) finds for `span`: by default the fastest.

    Each block runs once, in order, and no peer is visited twice. Peers in `exclude` and peers with
    fewer than `min_free_tokens` free cache tokens are not used; `penalty` is in seconds and added
    to a visit. The chain begins and ends at the client, who has measured `entry_rtt_ms` to some, or
    at the peers `after` and `before` whom it is to connect. An empty span gives an empty chain.
    Equal nodes are chosen by lower peer ids. Raises `MissingBlocksError` with the ranges that no
    usable peer holds.
    """
    if len(span) == 0:
        return ()
    problem = problem_of(
        snapshot,
        span,
        penalty=penalty,
        exclude=exclude,
        min_free_tokens=min_free_tokens,
        entry_rtt_ms=entry_rtt_ms,
        after=after,
        before=before,
    )
    try:
        chain = choose(problem)
    except MissingBlocksError as error:
        # Problems count their blocks from 0.
        runs = tuple(Span(span.start + a, span.start + b) for a, b in error.missing)
        raise missing_blocks(runs) from None
    return tuple(
        Hop(problem.peers[visit.node], Span(span.start + visit.start, span.start + visit.end))
        for visit in chain
    )


def problem_of(
    snapshot: Snapshot,
    span: Span,
    *,
    penalty: Penalty = no_penalty,
    exclude: frozenset[PeerId] = frozenset(),
    min_free_tokens: int = 0,
    entry_rtt_ms: Mapping[PeerId, float] | None = None,
    after: PeerId | None = None,
    before: PeerId | None = None,
) -> Problem:
    """What `plan_chain` hands to the strategy, nodes in the order of their peer ids.

    `span` must not be empty.
    """
    nodes = tuple(sorted(snapshot.nodes, key=lambda node: node.peer_id))
    snapshot = replace(snapshot, nodes=nodes)
    penalties_s = {node.peer_id: max(penalty(node.peer_id), 0.0) for node in nodes}
    request = Request(
        span=span,
        entry_rtt_ms=entry_rtt_ms,
        penalties_s=penalties_s,
        exclude=exclude,
        min_free_tokens=min_free_tokens,
    )
    problem = build_problem(snapshot, request)
    if after is not None:
        to_N = transfer_seconds(snapshot, (after, *problem.peers), request)[0, 1:]
        problem = replace(problem, entry_s_N=to_N)
    if before is not None:
        from_N = transfer_seconds(snapshot, (before, *problem.peers), request)[1:, 0]
        problem = replace(problem, exit_s_N=from_N)
    return problem


def chain_cost_s(
    snapshot: Snapshot,
    hops: Sequence[Hop],
    *,
    penalty: Penalty = no_penalty,
    entry_rtt_ms: Mapping[PeerId, float] | None = None,
) -> float:
    """The time of a decoded token, as `plan_chain` counts it, of `hops` that follow one another.

    Raises `KeyError` for unknown peers.
    """
    if not hops:
        return 0.0
    span = Span(hops[0].span.start, hops[-1].span.end)
    problem = problem_of(snapshot, span, penalty=penalty, entry_rtt_ms=entry_rtt_ms)
    rows = {peer: row for row, peer in enumerate(problem.peers)}
    chain = [
        Visit(rows[hop.peer_id], hop.span.start - span.start, hop.span.end - span.start)
        for hop in hops
    ]
    return terms(problem, chain).total_s
