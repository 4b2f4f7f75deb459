"""Plans of pieces: what they hold, how they travel, and which of them are refused."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.core.ids import Span
from nesa_node.sharding.graph_plan import (
    MAX_PLAN_BYTES,
    GraphPlan,
    PieceWork,
    check_plan,
    cut_evenly,
    decode_plan,
    encode_plan,
    find_interface,
    measure_work,
)
from nesa_node.sharding.operation_graph import (
    Machine,
    Operation,
    OperationGraph,
    Share,
    Value,
    block_cost,
)
from tests.sharding.random_graphs import random_graph

DIGEST = bytes(range(32))
VERSIONS = {"torch": "2.13.0"}


def chain(count: int) -> OperationGraph:
    """Operations of which each uses what the one before made."""
    operations = tuple(Operation(f"op{at}", "mul", 1e9, 1e6) for at in range(count))
    given = Value(4e6, None, (0,))
    values = [
        Value(4e6, at, (at + 1,) if at + 1 < count else (), at + 1 == count) for at in range(count)
    ]
    return OperationGraph(operations, (given, *values))


def plan_of(*pieces: tuple[int, ...], **more: Any) -> GraphPlan:
    fields: dict[str, Any] = {
        "graph": DIGEST.hex(),
        "dtype": "float32",
        "batch": 1,
        "tokens": 128,
        "image_size": None,
        "made_with": VERSIONS,
        "pieces": pieces,
    }
    return GraphPlan(**(fields | more))


def test_plans_travel() -> None:
    plan = plan_of((0, 2), (1, 3))
    assert decode_plan(encode_plan(plan), where="a test") == plan
    assert plan.operations(Span(0, 2)) == (0, 2, 1, 3)
    other = plan_of((0, 2), (1, 3), made_with={"torch": "3"})
    assert plan.digest == other.digest != plan_of((0, 1), (2, 3)).digest
    told = plan_of((0, 2), (1, 3), work=(PieceWork(1, 2, 3, 4), PieceWork(5, 6, 7, 8)))
    assert decode_plan(encode_plan(told), where="a test").work == told.work
    assert told.digest == plan.digest


def test_work_of_a_piece_is_what_its_cost_is_made_of() -> None:
    rng = random.Random(5)
    machine = Machine(
        flop_per_s=1.0, moved_bytes_per_s=math.inf, link_bytes_per_s=1.0, fast_memory_bytes=math.inf
    )
    for _ in range(30):
        graph = random_graph(12, rng)
        start = rng.randrange(12)
        operations = range(start, rng.randrange(start, 12) + 1)
        work, cost = measure_work(graph, operations), block_cost(graph, operations, machine)
        assert (work.received_bytes, work.sent_bytes) == (cost.receive_s, cost.send_s)
        assert work.flop == sum(graph.operations[each].flop for each in operations)
        assert work.weight_bytes == cost.parameter_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": []},
        {"pieces": [[]]},
        {"pieces": [[-1]]},
        {"pieces": [[1 << 30]]},
        {"pieces": [[0]] * 1025},
        {"graph": "00"},
        {"dtype": "int8"},
        {"batch": 0},
        {"version": 2},
        {"code": "import os"},
        {"made_with": {str(at): "1" for at in range(9)}},
    ],
)
def test_what_is_no_plan(change: dict[str, Any]) -> None:
    fields = msgspec.json.decode(encode_plan(plan_of((0,)))) | change
    with pytest.raises(ConfigError, match="a test is no plan of pieces"):
        decode_plan(msgspec.json.encode(fields), where="a test")


def test_bytes_that_are_no_plan() -> None:
    rng = random.Random(0)
    content = encode_plan(plan_of((0, 1), (2, 3)))
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode_plan(bytes(damaged), where="a test")
        except ConfigError:
            continue
    with pytest.raises(ConfigError, match="at most"):
        decode_plan(b" " * (MAX_PLAN_BYTES + 1), where="a test")


def test_plans_of_other_graphs_are_refused() -> None:
    graph = chain(4)
    check_plan(plan_of((0, 1), (2, 3)), graph, DIGEST, VERSIONS)
    with pytest.raises(
        UnsupportedFeatureError,
        match=r"another graph than the one captured here: another version of nesa-node",
    ):
        check_plan(plan_of((0, 1), (2, 3), graph="0" * 64), graph, DIGEST, VERSIONS)
    with pytest.raises(UnsupportedFeatureError, match=r"torch 2\.13\.0 there, 2\.14 here"):
        check_plan(plan_of((0,), graph="0" * 64), graph, DIGEST, {"torch": "2.14"})
    for pieces in (((0, 1),), ((0, 1), (1, 2, 3)), ((0, 1), (2, 3, 4))):
        with pytest.raises(UnsupportedFeatureError, match="each of the graph's 4 operations once"):
            check_plan(plan_of(*pieces), graph, DIGEST, VERSIONS)
    with pytest.raises(UnsupportedFeatureError, match="before they are made"):
        check_plan(plan_of((2, 3), (0, 1)), graph, DIGEST, VERSIONS)


def test_what_pieces_get_and_give() -> None:
    rng = random.Random(1)
    for _ in range(30):
        graph = random_graph(12, rng)
        inside = set(rng.sample(range(len(graph)), rng.randint(1, len(graph))))
        found = find_interface(graph, sorted(inside))
        for index, value in enumerate(graph.values):
            users = set(value.consumers)
            made_here = value.producer in inside
            assert (index in found.received) == (not made_here and bool(users & inside))
            leaves = value.is_output or bool(users - inside)
            assert (index in found.sent) == (made_here and leaves)


@pytest.mark.parametrize("count", [1, 2, 5, 9, 12])
def test_no_piece_is_empty(count: int) -> None:
    graph = chain(12)
    pieces = cut_evenly(graph, count)
    assert len(pieces) == count
    assert [each for piece in pieces for each in piece] == list(range(12))
    assert all(pieces)
    assert max(map(len, pieces)) <= -(-12 // count) + 1


def test_more_pieces_than_operations() -> None:
    for count in (0, 13):
        with pytest.raises(ConfigError, match=rf"{count} pieces: a network of 12 operations"):
            cut_evenly(chain(12), count)


def test_a_piece_is_of_one_share_alone() -> None:
    """Of two chains side by side; what runs more often is cut into more pieces."""
    one = chain(6)
    values = [
        Value(
            value.size_bytes,
            None if value.producer is None else value.producer + 6,
            tuple(each + 6 for each in value.consumers),
            value.is_output,
        )
        for value in one.values
    ]
    first, second = tuple(range(6)), tuple(range(6, 12))
    shares = Share(first, 1), Share(second, 10)
    both = OperationGraph(one.operations * 2, (*one.values, *values), (), shares)
    assert cut_evenly(both, 4) == (first, (6, 7), (8, 9), (10, 11))
    assert cut_evenly(both, 2) == (first, second)
    with pytest.raises(ConfigError, match="1 pieces: a pipeline of 2 networks has 2 to 12"):
        cut_evenly(both, 1)
    with pytest.raises(ConfigError, match="13 pieces: "):
        cut_evenly(both, 13)
    assert len(cut_evenly(both, 12)) == 12
    with pytest.raises(UnsupportedFeatureError, match="a piece of two networks"):
        check_plan(plan_of(first[:5], (5, 6), second[1:]), both, DIGEST, VERSIONS)
