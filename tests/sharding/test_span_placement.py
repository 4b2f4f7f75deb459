from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.sharding.span_placement import choose_span, reconsider_span
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures
from nesa_node.topology.snapshot import NodeState, Snapshot

EMPTY = Snapshot(ModelId("m@0"), 30, (), 0.0)


def _with(snapshot: Snapshot, *spans: tuple[int, int], speed: float = 5.0) -> Snapshot:
    added = tuple(
        NodeState(PeerId(f"n{len(snapshot.nodes) + i}"), Span(*span), decode_tokens_per_s=speed)
        for i, span in enumerate(spans)
    )
    return replace(snapshot, nodes=snapshot.nodes + added)


@pytest.mark.parametrize("seed", range(10))
def test_three_nodes_one_after_the_other_take_different_thirds(seed: int) -> None:
    snapshot = EMPTY
    for step in range(3):
        span = choose_span(snapshot, 10, rng=random.Random(f"{seed} {step}"))
        snapshot = _with(snapshot, (span.start, span.end))
    assert snapshot.coverage() == (1,) * 30


@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_start_at_once_part_after_they_saw_each_other(seed: int) -> None:
    names = [PeerId(f"peer{i}") for i in range(3)]
    chosen = {name: choose_span(EMPTY, 10, rng=random.Random(f"{seed} {name}")) for name in names}
    for _ in names:
        seen = replace(EMPTY, joining=tuple(NodeState(name, chosen[name]) for name in names))
        chosen = {
            name: reconsider_span(seen, name, chosen[name], rng=random.Random(name))
            for name in names
        }
    assert sorted(chosen.values()) == [Span(0, 10), Span(10, 20), Span(20, 30)]


def test_lowest_joining_peer_keeps_its_span() -> None:
    joining = (NodeState(PeerId("a"), Span(0, 10)), NodeState(PeerId("b"), Span(0, 10)))
    seen = replace(EMPTY, joining=joining)
    assert reconsider_span(seen, PeerId("a"), Span(0, 10)) == Span(0, 10)
    assert reconsider_span(seen, PeerId("b"), Span(0, 10)) == Span(10, 20)


def test_own_earlier_record_does_not_count_as_a_holder() -> None:
    seen = replace(EMPTY, joining=(NodeState(PeerId("a"), Span(10, 20)),))
    assert reconsider_span(seen, PeerId("a"), Span(10, 20)) == Span(10, 20)


def test_holes_come_before_slow_blocks() -> None:
    snapshot = _with(_with(EMPTY, (0, 10), speed=0.1), (10, 28), speed=100.0)
    assert choose_span(snapshot, 2) == Span(28, 30)


def test_covered_swarm_gets_replicas_where_it_is_slowest() -> None:
    snapshot = _with(_with(EMPTY, (0, 10), (20, 30), speed=9.0), (10, 20), speed=2.0)
    assert choose_span(snapshot, 10, tokens_per_s=5.0) == Span(10, 20)


def test_joining_nodes_count_as_holders() -> None:
    snapshot = replace(EMPTY, joining=(NodeState(PeerId("a"), Span(0, 20)),))
    assert choose_span(snapshot, 10) == Span(20, 30)


def test_more_blocks_than_the_model_has_means_all_of_them() -> None:
    assert choose_span(EMPTY, 99) == Span(0, 30)


def test_same_generator_gives_the_same_span() -> None:
    spans = {choose_span(EMPTY, 7, rng=random.Random("peer")) for _ in range(5)}
    assert len(spans) == 1


@pytest.mark.parametrize(("blocks", "model_blocks"), [(0, 30), (-1, 30), (5, 0)])
def test_nothing_to_place_is_refused(blocks: int, model_blocks: int) -> None:
    with pytest.raises(ValueError, match="cannot place"):
        choose_span(replace(EMPTY, num_blocks=model_blocks), blocks)


def test_no_other_span_raises_the_slowest_block_further() -> None:
    """Against every alternative, on covered swarms of random speeds."""
    rng = random.Random(3)
    for _ in range(50):
        blocks = rng.randint(2, 8)
        snapshot = replace(EMPTY, num_blocks=blocks)
        for _ in range(rng.randint(1, 3)):
            snapshot = _with(snapshot, (0, blocks), speed=rng.uniform(1, 9))
        start = rng.randrange(blocks)
        snapshot = _with(snapshot, (start, blocks), speed=rng.uniform(1, 9))
        width = rng.randint(1, blocks)
        chosen = choose_span(snapshot, width, tokens_per_s=4.0)
        slowest = {
            first: min(_speeds(snapshot, Span(first, first + width)))
            for first in range(blocks - width + 1)
        }
        assert slowest[chosen.start] == pytest.approx(max(slowest.values()))


def _speeds(snapshot: Snapshot, new: Span) -> list[float]:
    nodes = [(node.span, node.decode_tokens_per_s) for node in snapshot.nodes]
    return [
        sum(speed for span, speed in itertools.chain(nodes, [(new, 4.0)]) if block in _range(span))
        for block in range(snapshot.num_blocks)
    ]


def _range(span: Span) -> range:
    return range(span.start, span.end)


def test_a_joining_node_counts_as_fast_as_its_figures_say() -> None:
    """It will decode 50 tokens/s through the first half, which is served by a tenth of that."""
    snapshot = _with(_with(EMPTY, (0, 15), speed=5.0), (15, 30), speed=20.0)
    roofline = Roofline(WeightFigures(0.0, 750e6, 1e12), BlockWork(1e6, 1e6))
    for known, chosen in ((None, Span(0, 15)), (roofline, Span(15, 30))):
        joining = NodeState(PeerId("joining"), Span(0, 15), roofline=known)
        assert choose_span(replace(snapshot, joining=(joining,)), 15) == chosen
