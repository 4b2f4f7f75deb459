"""Who is named to fill holes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.sharding.span_placement import is_covered_without, plan_repairs, unheld_blocks
from nesa_node.topology.snapshot import NodeState, Snapshot, count_holders

BLOCKS = 9


def _node(name: str, start: int, end: int, *, movable: bool = True) -> NodeState:
    return NodeState(PeerId(name), Span(start, end), decode_tokens_per_s=5.0, movable=movable)


def _snapshot(*nodes: NodeState, joining: tuple[NodeState, ...] = ()) -> Snapshot:
    return Snapshot(ModelId("m@0"), BLOCKS, nodes, 0.0, joining=joining)


def test_lowest_of_equal_spares_moves_and_nobody_else() -> None:
    snapshot = _snapshot(_node("c", 0, 3), _node("b", 0, 3), _node("a", 3, 6))
    assert unheld_blocks(snapshot) == {6, 7, 8}
    assert plan_repairs(snapshot, {6, 7, 8}) == {"b": Span(6, 9)}


def test_whoever_leaves_the_most_replicas_moves() -> None:
    snapshot = _snapshot(
        *(_node(name, 0, 3) for name in "ab"), *(_node(name, 3, 6) for name in "xyz")
    )
    assert plan_repairs(snapshot, {6, 7, 8}) == {"x": Span(6, 9)}


def test_pinned_nodes_and_only_holders_stay() -> None:
    pinned = [_node(name, 0, 3, movable=False) for name in "ab"]
    assert plan_repairs(_snapshot(*pinned, _node("c", 3, 6)), {6, 7, 8}) == {}


def test_joining_replica_does_not_make_a_node_spare() -> None:
    nodes = (_node("a", 0, 3), _node("b", 3, 6))
    snapshot = _snapshot(*nodes, joining=(_node("c", 0, 3),))
    assert not is_covered_without(snapshot, PeerId("a"), Span(0, 3))
    assert plan_repairs(snapshot, {6, 7, 8}) == {}


def test_hole_that_somebody_loads_is_none() -> None:
    snapshot = _snapshot(
        _node("a", 0, 3), _node("b", 0, 3), _node("c", 3, 6), joining=(_node("d", 6, 9),)
    )
    assert not unheld_blocks(snapshot)
    assert plan_repairs(snapshot, {6, 7, 8}) == {}


def test_several_holes_are_filled_by_several_at_once() -> None:
    snapshot = _snapshot(*(_node(name, 0, 3) for name in "abcd"))
    assert plan_repairs(snapshot, set(range(3, 9))) == {"a": Span(3, 6), "b": Span(6, 9)}


def test_last_of_two_replicas_is_not_named_after_the_first() -> None:
    assert list(plan_repairs(_snapshot(_node("a", 0, 3), _node("b", 0, 3)), {3, 8})) == ["a"]


@pytest.mark.parametrize("seed", range(30))
def test_every_node_makes_the_same_plan_and_no_block_is_given_up(seed: int) -> None:
    rng = random.Random(seed)
    nodes = []
    for number in range(rng.randint(2, 12)):
        start = rng.randrange(BLOCKS - 2)
        span = Span(start, rng.randint(start + 1, BLOCKS))
        speed = rng.choice([0.0, 0.1, 3.3, 5.0])
        nodes.append(
            NodeState(
                PeerId(f"n{number}"),
                span,
                decode_tokens_per_s=speed,
                movable=rng.random() < 0.8,
            )
        )
    snapshot = _snapshot(*nodes)
    plan = plan_repairs(snapshot, unheld_blocks(snapshot))
    rng.shuffle(nodes)
    assert plan_repairs(_snapshot(*nodes), unheld_blocks(snapshot)) == plan
    before = snapshot.coverage()
    stay = [node for node in nodes if node.peer_id not in plan]
    kept = count_holders(stay, BLOCKS)
    assert all(kept[block] for block in range(BLOCKS) if before[block])
    moved = [replace(node, span=plan[node.peer_id]) for node in nodes if node.peer_id in plan]
    after = count_holders([*stay, *moved], BLOCKS)
    assert sum(map(bool, after)) >= sum(map(bool, before)) + len(moved)
