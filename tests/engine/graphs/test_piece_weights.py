"""Pieces whose weights do not all fit into the memory for them give what those in memory give."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.engine.graphs.model_graph import RequestSizes
from nesa_node.engine.graphs.network import Network
from nesa_node.engine.graphs.piece import GraphPiece
from nesa_node.engine.graphs.piece_weights import ResidentWeights, StreamedWeights
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.families import read_network_config
from nesa_node.sharding.graph_plan import GraphPlan
from tests.e2e.test_networks import save

CPU = torch.device("cpu")
PIECES = 3
NAMES = ("BertForSequenceClassification", "ResNetForImageClassification")


@pytest.fixture(params=NAMES)
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Network:
    save(request.param, tmp_path)
    checkpoint = open_folder(tmp_path, read_network_config)
    return Network(checkpoint, torch.float32, RequestSizes(tokens=8, image_size=32))


@pytest.fixture
def plan(network: Network) -> GraphPlan:
    return network.make_plan(PIECES)


@pytest.fixture
def resident(network: Network, plan: GraphPlan) -> ResidentWeights:
    program = network.build_piece(plan.operations(Span(0, PIECES)), CPU)
    return ResidentWeights(network, network.load_weights(program, CPU), CPU)


@pytest.fixture
def streamed(network: Network, plan: GraphPlan) -> Iterator[StreamedWeights]:
    """A half of the weights fits."""
    span = Span(0, PIECES)
    memory = max(network.count_weight_bytes(plan.operations(span)) // 2, 2 * largest(network))
    weights = StreamedWeights(network, plan, span, CPU, memory)
    yield weights
    weights.close()


def largest(network: Network) -> int:
    return max(network.count_weight_bytes([each]) for each in range(len(network.captured.graph)))


def inputs(network: Network, plan: GraphPlan, span: Span, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    made = []
    for index in network.find_interface(plan.operations(span)).received:
        expected = network.find_shape(index, network.example_sizes)
        whole = not expected.dtype.is_floating_point
        values = torch.randint(0, 2, expected.shape) if whole else torch.randn(expected.shape)
        made.append(values.to(expected.dtype))
    return made


def test_outputs_are_those_of_weights_in_memory(
    network: Network, plan: GraphPlan, resident: ResidentWeights, streamed: StreamedWeights
) -> None:
    """Also of spans within the span, one after another in any order."""
    sizes = network.example_sizes
    for seed, (start, end) in enumerate([(0, 3), (0, 3), (1, 2), (2, 3), (0, 1), (1, 3), (0, 3)]):
        span = Span(start, end)
        given = inputs(network, plan, span, seed)
        operations = plan.operations(span)
        expected, found = resident.find_piece(operations), streamed.find_piece(operations)
        assert found.interface == expected.interface
        for one, other in zip(expected.run(given, sizes), found.run(given, sizes), strict=True):
            assert torch.equal(one, other)


def held_bytes(streamed: StreamedWeights) -> int:
    """Bytes that modules hold, and what is read ahead."""
    read = streamed._reading[1].result() if streamed._reading is not None else {}
    loaded: list[Tensor] = [
        getattr(segment.program.module, attribute)
        for segment in streamed._segments
        for attribute in segment.program.weights
    ]
    return sum(each.nbytes for each in [*read.values(), *loaded] if not each.is_meta)


def test_no_more_weights_are_in_memory_than_may_be(
    network: Network, plan: GraphPlan, streamed: StreamedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    run = GraphPiece.run

    def look(self: GraphPiece, *args: Any) -> Any:
        held.append(held_bytes(streamed))
        return run(self, *args)

    monkeypatch.setattr(GraphPiece, "run", look)
    span = Span(0, PIECES)
    for seed in range(2):
        streamed.find_piece(plan.operations(span)).run(
            inputs(network, plan, span, seed), network.example_sizes
        )
    assert streamed.resident_bytes < max(held) <= streamed.held_bytes


def test_weights_are_read_while_others_are_used(
    network: Network, plan: GraphPlan, streamed: StreamedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    began = threading.Event()
    read, run = StreamedWeights._read, GraphPiece.run

    def note_read(self: StreamedWeights, segment: Any) -> Any:
        events.append("read")
        began.set()
        return read(self, segment)

    def note_run(self: GraphPiece, *args: Any) -> Any:
        if all(each is not self for each in residents):
            assert began.wait(10), "the next weights are read once these are used"
            began.clear()
            events.append("run")
        return run(self, *args)

    residents = [each.resident for each in streamed._segments if each.resident]
    monkeypatch.setattr(StreamedWeights, "_read", note_read)
    monkeypatch.setattr(GraphPiece, "run", note_run)
    span = Span(0, PIECES)
    streamed.find_piece(plan.operations(span)).run(
        inputs(network, plan, span, 0), network.example_sizes
    )
    assert streamed._reading is not None
    streamed._reading[1].result()
    assert events.count("run") >= 2
    assert events.count("read") == events.count("run") + 1


def test_read_that_failed_is_made_again_and_what_failed_keeps_no_weights(
    network: Network, plan: GraphPlan, streamed: StreamedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = Span(0, PIECES)
    piece, given = streamed.find_piece(plan.operations(span)), inputs(network, plan, span, 0)
    expected = piece.run(given, network.example_sizes)
    read, failures = StreamedWeights._read, 3

    def fail(self: StreamedWeights, segment: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("no such file")
        return read(self, segment)

    monkeypatch.setattr(StreamedWeights, "_read", fail)
    for _ in range(6):
        with suppress(OSError):
            piece.run(given, network.example_sizes)
    assert failures < 0
    run = GraphPiece.run

    def fail_streamed(self: GraphPiece, *args: Any) -> Any:
        if any(segment.resident is self for segment in segments):
            return run(self, *args)
        raise RuntimeError("no such token")

    segments = streamed._segments
    with monkeypatch.context() as patch:
        patch.setattr(GraphPiece, "run", fail_streamed)
        with pytest.raises(RuntimeError, match="no such token"):
            piece.run(given, network.example_sizes)
    assert held_bytes(streamed) <= streamed.held_bytes
    loaded = [
        segment
        for segment in segments
        if segment.resident is None
        and any(
            not getattr(segment.program.module, attribute).is_meta
            for attribute in segment.program.weights
        )
    ]
    assert not loaded
    for one, other in zip(expected, piece.run(given, network.example_sizes), strict=True):
        assert torch.equal(one, other)


def test_memory_for_less_than_two_operations(network: Network, plan: GraphPlan) -> None:
    with pytest.raises(InsufficientMemoryError, match="GiB are the least"):
        StreamedWeights(network, plan, Span(0, PIECES), CPU, 2 * largest(network) - 1)
