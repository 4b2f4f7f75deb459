from dataclasses import replace

import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures
from nesa_node.topology.snapshot import NodeState, Snapshot, zero_runs

MODEL = ModelId("m@0")


def _node(name: str, start: int, end: int) -> NodeState:
    return NodeState(PeerId(name), Span(start, end))


def test_coverage_counts_the_holders_of_each_block() -> None:
    snapshot = Snapshot(MODEL, 5, (_node("a", 0, 3), _node("b", 2, 4)), 0.0)
    assert snapshot.coverage() == (1, 1, 2, 1, 0)
    assert snapshot.holes() == (Span(4, 5),)


def test_joining_nodes_cover_nothing_yet() -> None:
    snapshot = Snapshot(MODEL, 2, (), 0.0, joining=(_node("a", 0, 2),))
    assert snapshot.holes() == (Span(0, 2),)


def test_span_beyond_the_model_is_cut() -> None:
    assert Snapshot(MODEL, 2, (_node("a", 1, 9),), 0.0).coverage() == (0, 1)


def test_model_without_blocks_has_no_holes() -> None:
    assert Snapshot(MODEL, 0, (), 0.0).holes() == ()


def test_without_takes_a_peer_out_of_both_lists() -> None:
    snapshot = Snapshot(MODEL, 2, (_node("a", 0, 1),), 0.0, joining=(_node("b", 0, 1),))
    assert snapshot.without_peers(PeerId("a")).nodes == ()
    assert snapshot.without_peers(PeerId("b")).joining == ()
    assert snapshot.find_node(PeerId("a")) is snapshot.nodes[0]
    assert snapshot.find_node(PeerId("b")) is None


def test_zero_runs_are_maximal() -> None:
    assert zero_runs((0, 0, 1, 0, 2, 0)) == (Span(0, 2), Span(3, 4), Span(5, 6))


def test_later_fields_change_no_digest_where_they_have_no_value() -> None:
    """The digest is that of the program before it knew them: stored snapshots stay readable."""
    node = NodeState(PeerId("a"), Span(0, 3), decode_tokens_per_s=2.0)
    snapshot = Snapshot(MODEL, 5, (node,), 7.0)
    before = "4d8d14a1aba2c7797f2004e94bc8f206a84719de7dc8d977fd9415efdd1e3fbc"
    assert snapshot.digest() == before
    roofline = Roofline(WeightFigures(0.0, 1.0, 1.0), BlockWork(1.0, 1.0))
    for other in (replace(node, gpu_memory_free_bytes=1), replace(node, roofline=roofline)):
        assert replace(snapshot, nodes=(other,)).digest() != before


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, None),
        ({"cpu_memory_total_bytes": 8, "cpu_memory_free_bytes": 2}, 0.25),
        (
            {
                "gpu_memory_total_bytes": 4,
                "gpu_memory_free_bytes": 3,
                "cpu_memory_total_bytes": 8,
            },
            0.75,
        ),
        ({"gpu_memory_total_bytes": 4, "gpu_memory_free_bytes": 9}, 1.0),
    ],
)
def test_free_memory_is_that_of_the_device_with_the_weights(
    fields: dict[str, int], share: float | None
) -> None:
    node = NodeState(PeerId("a"), Span(0, 1), **fields)  # type: ignore[arg-type]
    assert node.free_memory_share == share
