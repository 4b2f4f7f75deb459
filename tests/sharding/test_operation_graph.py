"""What a block costs, by hand."""

from __future__ import annotations

import math

import pytest

from nesa_node.sharding.operation_graph import (
    Machine,
    Operation,
    OperationGraph,
    Value,
    block_cost,
)

FAST = Machine(flop_per_s=10, moved_bytes_per_s=100, link_bytes_per_s=2, stream_bytes_per_s=4)


def diamond() -> OperationGraph:
    """0 gives to 1 and 2, these to 3; 1 and 3 have the same weights, and 3's result goes out."""
    return OperationGraph(
        (
            Operation("a", "k", 10, 50),
            Operation("b", "k", 20, 0, (0,)),
            Operation("c", "k", 0, 400),
            Operation("d", "k", 5, 0, (0, 1)),
        ),
        (
            Value(6, None, (0, 3)),
            Value(8, 0, (1, 2)),
            Value(10, 1, (3,)),
            Value(12, 2, (3,)),
            Value(14, 3, (), is_output=True),
        ),
        (100, 30),
    )


def test_work_is_arithmetic_or_traffic() -> None:
    assert FAST.work_s(diamond()).tolist() == [1.0, 2.0, 4.0, 0.5]


def test_values_are_sent_once() -> None:
    cost = block_cost(diamond(), [1, 2], FAST)
    assert (cost.receive_s, cost.send_s) == (8 / 2, (10 + 12) / 2)
    assert (cost.work_s, cost.overflow_s) == (6.0, 0.0)
    assert cost.parameter_bytes == 100
    # The first one's output leaves when it is made.
    assert cost.peak_bytes == max(8 + 10, 8 + 12)


def test_inputs_come_and_outputs_leave() -> None:
    cost = block_cost(diamond(), range(4), FAST)
    assert (cost.receive_s, cost.send_s) == (6 / 2, 14 / 2)
    assert cost.parameter_bytes == 130
    assert cost.peak_bytes == 6 + 10 + 12 + 14
    assert cost.total_s == 3 + 7.5 + 7


def test_what_does_not_fit_is_streamed() -> None:
    small = Machine(10, 100, 2, fast_memory_bytes=120, stream_bytes_per_s=4)
    assert block_cost(diamond(), range(4), small).overflow_s == (130 + 42 - 120) / 4
    assert block_cost(diamond(), [0], small).overflow_s == 0


def test_no_operations_cost_nothing() -> None:
    assert block_cost(diamond(), [], FAST).total_s == 0


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ((Value(1, 1, (0,)),), "ascending"),
        ((Value(1, 0, (0,)),), "ascending"),
        ((Value(1, 0, (1, 1)),), "ascending"),
        ((Value(1, 0, (2,)),), "ascending"),
        ((Value(-1, 0, (1,)),), "negative"),
        ((Value(math.nan, 0, (1,)),), "finite"),
    ],
)
def test_graphs_that_cannot_be(values: tuple[Value, ...], what: str) -> None:
    operations = (Operation("a", "k", 1, 1), Operation("b", "k", 1, 1))
    with pytest.raises(ValueError, match=what):
        OperationGraph(operations, values)


def test_parameters_must_exist() -> None:
    with pytest.raises(ValueError, match="a: parameters"):
        OperationGraph((Operation("a", "k", 1, 1, (1,)),), (), (5,))
    with pytest.raises(ValueError, match="without operations"):
        OperationGraph((), ())


def test_rates_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Machine(0, 1, 1)
    with pytest.raises(ValueError, match="memory"):
        Machine(1, 1, 1, fast_memory_bytes=-1)
