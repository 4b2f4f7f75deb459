"""What each node of a chain does with one request: the values it gets and sends, and where from.

Values go straight from the node that makes them to each that uses them, also past nodes between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chains import Hop
from nesa_node.sharding.graph_plan import SpanInterface


@dataclass(slots=True)
class ChainStep:
    """The part of one node."""

    peer: PeerId
    span: Span
    given: list[int] = field(default_factory=list)
    """Values that the client sends."""
    sources: dict[PeerId, list[int]] = field(default_factory=dict)
    """Values that other nodes send."""
    targets: dict[PeerId, list[int]] = field(default_factory=dict)
    """Values that other nodes get."""
    returned: list[int] = field(default_factory=list)
    """Values that the client gets."""


def find_steps(
    hops: Iterable[Hop],
    pieces: Collection[int],
    find_interface: Callable[[Span], SpanInterface],
    known: Mapping[int, object],
    outputs: Collection[int],
) -> Sequence[ChainStep]:
    """Steps that compute `outputs` in `pieces` of what the client knows.

    Empty where one node has all pieces, where one would have two parts, and where `hops` lack a
    piece: such requests go to one node after another.
    """
    steps: list[ChainStep] = []
    for hop in hops:
        own = sorted(piece for piece in pieces if hop.span.start <= piece < hop.span.end)
        if not own:
            continue
        if own[-1] - own[0] + 1 != len(own):
            return ()
        steps.append(ChainStep(hop.peer_id, Span(own[0], own[-1] + 1)))
    complete = sum(len(step.span) for step in steps) == len(pieces)
    if not complete or len({step.peer for step in steps}) != len(steps) or len(steps) < 2:
        return ()
    makers: dict[int, ChainStep] = {}
    for step in steps:
        interface = find_interface(step.span)
        for index in interface.received:
            if index in known:
                step.given.append(index)
            else:
                maker = makers[index]
                step.sources.setdefault(maker.peer, []).append(index)
                maker.targets.setdefault(step.peer, []).append(index)
        for index in interface.sent:
            makers[index] = step
            if index in outputs:
                step.returned.append(index)
    return steps
