"""The speed of pieces that a node announces is that of what it served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nesa_node.core.ids import Span
from nesa_node.engine.graphs.model_graph import RequestSizes
from nesa_node.engine.graphs.network import Network
from nesa_node.engine.graphs.piece_weights import ResidentWeights
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.families import read_network_config
from nesa_node.server.graphs import served_pieces
from nesa_node.server.graphs.served_pieces import MIN_TIMES, ServedPieces
from nesa_node.sharding.open_sizes import Sizes
from tests.e2e.test_networks import save

CPU = torch.device("cpu")


@pytest.fixture
def pieces(tmp_path: Path) -> ServedPieces:
    save("BertForSequenceClassification", tmp_path)
    checkpoint = open_folder(tmp_path, read_network_config)
    network = Network(checkpoint, torch.float32, RequestSizes(tokens=8))
    plan = network.make_plan(3)
    span = Span(0, 2)
    program = network.build_piece(plan.operations(span), CPU)
    weights = ResidentWeights(network, network.load_weights(program, CPU), CPU)
    return ServedPieces(network, plan, span, weights, CPU, 1 << 30)


def run(pieces: ServedPieces, span: Span, sizes: Sizes) -> None:
    values: dict[int, Tensor] = {}
    network = pieces.network
    for index in network.find_interface(pieces.plan.operations(span)).received:
        expected = network.find_shape(index, sizes)
        values[index] = torch.zeros(expected.shape, dtype=expected.dtype)
    pieces.run(span, sizes, values)


def test_the_mean_of_requests_of_the_usual_size(
    pieces: ServedPieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 0.5
        return now

    monkeypatch.setattr(served_pieces, "time", SimpleNamespace(perf_counter=tick))
    usual = pieces.network.example_sizes
    other = tuple(size + 1 for size in usual)
    for _ in range(MIN_TIMES):
        run(pieces, Span(0, 1), usual)
        run(pieces, pieces.span, other)
    assert pieces.take_mean_s() is None, "neither a part of the span nor another size counts"
    for _ in range(MIN_TIMES - 1):
        run(pieces, pieces.span, usual)
    assert pieces.take_mean_s() is None, "too few"
    run(pieces, pieces.span, usual)
    assert pieces.take_mean_s() == pytest.approx(0.5)
    assert pieces.take_mean_s() is None, "each once"
