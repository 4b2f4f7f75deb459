"""Chain planning for live sessions: from a snapshot and a request to hops, and repaired chains.

`chain_request.py` defines the time of a step, `strategies.py` the ways to choose a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import (
    Chain,
    ChainProblem,
    ChainRequest,
    Visit,
    build_problem,
    step_time,
    transfer_seconds,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.minplus import missing_blocks_error
from nesa_node.topology.snapshot import Snapshot

ChainChooser = Callable[[ChainProblem], Chain]
"""Chooses a chain: the method of a strategy, or `exact_latency`."""


@dataclass(frozen=True, slots=True)
class Hop:
    peer_id: PeerId
    span: Span


def plan_chain(
    snapshot: Snapshot,
    request: ChainRequest,
    *,
    choose: ChainChooser = exact_latency,
    after: PeerId | None = None,
    before: PeerId | None = None,
) -> tuple[Hop, ...]:
    """The chain that `choose` finds for `request`: by default the fastest.

    Each block runs once, in order, and no peer is visited twice. The chain begins and ends at the
    client, or at the peers `after` and `before` if given. Ties go to the lower peer id. Raises
    `MissingBlocksError` with the ranges that no usable peer holds.
    """
    span = request.span
    problem = make_problem(snapshot, request, after=after, before=before)
    try:
        chain = choose(problem)
    except MissingBlocksError as error:
        # A problem numbers its blocks from 0.
        runs = tuple(Span(span.start + a, span.start + b) for a, b in error.missing)
        raise missing_blocks_error(runs) from None
    return visits_to_hops(problem, chain, span.start)


def make_problem(
    snapshot: Snapshot,
    request: ChainRequest,
    *,
    after: PeerId | None = None,
    before: PeerId | None = None,
) -> ChainProblem:
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


def visits_to_hops(problem: ChainProblem, chain: Chain, first_block: int = 0) -> tuple[Hop, ...]:
    """`chain` of `problem`, whose blocks begin at `first_block` of the model, as hops."""
    return tuple(
        Hop(problem.peers[visit.node], Span(first_block + visit.start, first_block + visit.end))
        for visit in chain
    )


def hops_to_visits(problem: ChainProblem, span: Span, hops: Sequence[Hop]) -> Chain:
    """`hops` as a chain of `problem`, which is for `span`. Raises `KeyError` for unknown peers."""
    rows = {peer: row for row, peer in enumerate(problem.peers)}
    return tuple(
        Visit(rows[hop.peer_id], hop.span.start - span.start, hop.span.end - span.start)
        for hop in hops
    )


def chain_cost_s(snapshot: Snapshot, request: ChainRequest, hops: Sequence[Hop]) -> float:
    """Seconds of a step through `hops`, which run the request's whole span, as in `plan_chain`.

    Raises `KeyError` for unknown peers.
    """
    problem = make_problem(snapshot, request)
    return step_time(problem, hops_to_visits(problem, request.span, hops)).total_s


def find_gaps(span: Span, kept: Sequence[Hop]) -> tuple[Span, ...]:
    """The maximal parts of `span` that no hop of `kept` runs. `kept` is ordered and disjoint."""
    found = []
    at = span.start
    for hop in kept:
        if at < hop.span.start:
            found.append(Span(at, hop.span.start))
        at = hop.span.end
    if at < span.end:
        found.append(Span(at, span.end))
    return tuple(found)


def fill_gaps(
    snapshot: Snapshot,
    request: ChainRequest,
    kept: Sequence[Hop],
    *,
    choose: ChainChooser = exact_latency,
) -> tuple[Hop, ...]:
    """The hops of `kept` and the best chain in each gap, in block order; no peer occurs twice.

    The cost of a gap includes the transfers from the hop before it and to the hop after. With
    nothing kept this is `plan_chain`. Gaps are filled one after another, so that several together
    need not be optimal. Raises `MissingBlocksError` with all missing ranges.
    """
    hops = list(kept)
    used = request.exclude | {hop.peer_id for hop in kept}
    missing: list[tuple[int, int]] = []
    message = ""
    for gap in find_gaps(request.span, kept):
        try:
            filling = plan_chain(
                snapshot,
                replace(request, span=gap, exclude=used),
                choose=choose,
                after=next((hop.peer_id for hop in kept if hop.span.end == gap.start), None),
                before=next((hop.peer_id for hop in kept if hop.span.start == gap.end), None),
            )
        except MissingBlocksError as error:
            missing.extend(error.missing)
            message = message or str(error)
            continue
        hops.extend(filling)
        used |= {hop.peer_id for hop in filling}
    if missing:
        raise MissingBlocksError(missing, message)
    return tuple(sorted(hops, key=lambda hop: hop.span))
