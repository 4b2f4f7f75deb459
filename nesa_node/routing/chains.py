"""Chain planning for live sessions: from a snapshot and a request to hops.

`build.py` defines the time of a step, `strategies.py` the ways to choose a chain; the default is
the chain with the shortest step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.build import Request, build_problem, transfer_seconds
from nesa_node.routing.exact import exact_latency
from nesa_node.routing.minplus import missing_blocks
from nesa_node.routing.problem import Chain, Problem, Visit, terms
from nesa_node.topology.snapshot import Snapshot

Choose = Callable[[Problem], Chain]
"""Chooses a chain: the method of a strategy, or `exact_latency`."""


@dataclass(frozen=True, slots=True)
class Hop:
    peer_id: PeerId
    span: Span


def plan_chain(
    snapshot: Snapshot,
    request: Request,
    *,
    choose: Choose = exact_latency,
    after: PeerId | None = None,
    before: PeerId | None = None,
) -> tuple[Hop, ...]:
    """The chain that `choose` finds for `request`: by default the fastest.

    Each block runs once, in order, and no peer is visited twice. The chain begins and ends at the
    client, or at the peers `after` and `before` if given. Ties go to the lower peer id. Raises
    `MissingBlocksError` with the ranges that no usable peer holds.
    """
    span = request.span
    problem = problem_of(snapshot, request, after=after, before=before)
    try:
        chain = choose(problem)
    except MissingBlocksError as error:
        # A problem numbers its blocks from 0.
        runs = tuple(Span(span.start + a, span.start + b) for a, b in error.missing)
        raise missing_blocks(runs) from None
    return tuple(
        Hop(problem.peers[visit.node], Span(span.start + visit.start, span.start + visit.end))
        for visit in chain
    )


def problem_of(
    snapshot: Snapshot,
    request: Request,
    *,
    after: PeerId | None = None,
    before: PeerId | None = None,
) -> Problem:
    """The problem that `plan_chain` passes to the strategy, nodes ordered by peer id."""
    nodes = tuple(sorted(snapshot.nodes, key=lambda node: node.peer_id))
    snapshot = replace(snapshot, nodes=nodes)
    problem = build_problem(snapshot, request)
    if after is not None:
        to_N = transfer_seconds(snapshot, (after, *problem.peers), request)[0, 1:]
        problem = replace(problem, entry_s_N=to_N)
    if before is not None:
        from_N = transfer_seconds(snapshot, (before, *problem.peers), request)[1:, 0]
        problem = replace(problem, exit_s_N=from_N)
    return problem


def visits_of(problem: Problem, span: Span, hops: Sequence[Hop]) -> Chain:
    """`hops` as a chain of `problem`, which is for `span`. Raises `KeyError` for unknown peers."""
    rows = {peer: row for row, peer in enumerate(problem.peers)}
    return tuple(
        Visit(rows[hop.peer_id], hop.span.start - span.start, hop.span.end - span.start)
        for hop in hops
    )


def chain_cost_s(snapshot: Snapshot, request: Request, hops: Sequence[Hop]) -> float:
    """Seconds of a step through `hops`, which run the request's whole span, as in `plan_chain`.

    Raises `KeyError` for unknown peers.
    """
    problem = problem_of(snapshot, request)
    return terms(problem, visits_of(problem, request.span, hops)).total_s
