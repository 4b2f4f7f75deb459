"""Which values nodes of a chain send each other, on random graphs with values that skip nodes."""

from __future__ import annotations

import random
from collections.abc import Callable

from nesa_node.client.graphs.chain_steps import find_steps
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chains import Hop
from nesa_node.sharding.graph_plan import SpanInterface, find_interface
from nesa_node.sharding.operation_graph import OperationGraph
from tests.sharding.random_graphs import random_graph

PIECES = 6


def cut(graph: OperationGraph, rng: random.Random) -> list[range]:
    ends = sorted(rng.sample(range(1, len(graph)), PIECES - 1))
    return [range(start, end) for start, end in zip([0, *ends], [*ends, len(graph)], strict=True)]


def finder(graph: OperationGraph, pieces: list[range]) -> Callable[[Span], SpanInterface]:
    def find(span: Span) -> SpanInterface:
        return find_interface(
            graph, [each for one in pieces[span.start : span.end] for each in one]
        )

    return find


def test_each_value_comes_from_where_it_is_made_and_is_sent_once_to_each_node() -> None:
    rng = random.Random(3)
    skipped = 0
    for _ in range(60):
        graph = random_graph(20, rng)
        pieces = cut(graph, rng)

        find = finder(graph, pieces)

        hops = [
            Hop(PeerId("a"), Span(0, 2)),
            Hop(PeerId("b"), Span(2, 3)),
            Hop(PeerId("c"), Span(3, 6)),
        ]
        inputs = {index: 0 for index, value in enumerate(graph.values) if value.producer is None}
        outputs = {index for index, value in enumerate(graph.values) if value.is_output}
        steps = find_steps(hops, range(PIECES), find, inputs, outputs - inputs.keys())
        assert [step.peer for step in steps] == ["a", "b", "c"]
        interfaces: list[SpanInterface] = [find(step.span) for step in steps]
        for number, (step, interface) in enumerate(zip(steps, interfaces, strict=True)):
            came = step.given + [each for values in step.sources.values() for each in values]
            assert sorted(came) == list(interface.received)
            assert set(step.given) <= inputs.keys()
            for later, following in zip(steps[number + 1 :], interfaces[number + 1 :], strict=True):
                needed = set(interface.sent) & set(following.received)
                assert set(step.targets.get(later.peer, [])) == needed
                assert set(later.sources.get(step.peer, [])) == needed
                skipped += bool(needed) and later is not steps[number + 1]
            assert set(step.returned) == set(interface.sent) & outputs
    assert skipped


def test_no_chain_of_one_node_of_a_node_with_two_parts_or_with_a_piece_missing() -> None:
    graph = random_graph(20, random.Random(1))
    pieces = cut(graph, random.Random(1))

    find = finder(graph, pieces)

    inputs = {index: 0 for index, value in enumerate(graph.values) if value.producer is None}
    a, b = PeerId("a"), PeerId("b")
    for hops, needed in (
        ([Hop(a, Span(0, 6))], range(6)),
        ([Hop(a, Span(0, 2)), Hop(b, Span(2, 4)), Hop(a, Span(4, 6))], range(6)),
        ([Hop(a, Span(0, 2)), Hop(b, Span(3, 6))], range(6)),
        ([Hop(a, Span(0, 4)), Hop(b, Span(4, 6))], [0, 2, 5]),
        ([Hop(a, Span(0, 4)), Hop(b, Span(4, 6))], [4, 5]),
    ):
        assert not find_steps(hops, needed, find, inputs, ())
