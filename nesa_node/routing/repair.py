"""Repaired chains: the working hops of a broken chain and new hops in its gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.chains import Choose, Hop, plan_chain
from nesa_node.routing.exact import exact_latency
from nesa_node.topology.snapshot import Snapshot


def gaps(span: Span, kept: Sequence[Hop]) -> tuple[Span, ...]:
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
    request: Request,
    kept: Sequence[Hop],
    *,
    choose: Choose = exact_latency,
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
    for gap in gaps(request.span, kept):
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
