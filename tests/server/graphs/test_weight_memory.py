"""A node that keeps a part of its weights in memory, by `--weight-memory-gib`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.errors import ConfigError, InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.graphs.piece_weights import StreamedWeights
from nesa_node.server.graphs.graph_model import GraphModel
from nesa_node.server.node.span_choice import open_node_model
from tests.e2e.test_networks import inputs, save
from tests.engine.tiny_models import save_tiny_model
from tests.swarms import in_process_swarm

pytestmark = pytest.mark.timeout(300)  # each node captures the network
PIECES = 4


def open_model(folder: Path, **options: Any) -> tuple[NodeConfig, Any]:
    config = NodeConfig(
        model=str(folder), pieces=PIECES, image_size=32, torch_dtype="float32", **options
    )
    return config, open_node_model(config)


@torch.no_grad()
def test_answers_are_those_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save("ViTForImageClassification", tmp_path / "model")
    total = sum(each.nbytes for each in model.parameters())
    made: list[StreamedWeights] = []
    find = StreamedWeights.find_piece

    def note(self: StreamedWeights, operations: Sequence[int]) -> Any:
        made.append(self)
        return find(self, operations)

    monkeypatch.setattr(StreamedWeights, "find_piece", note)
    options = {"pieces": PIECES, "image_size": 32, "weight_memory_gib": 0.6 * total / 2**30}
    with (
        in_process_swarm(tmp_path / "model", [Span(0, PIECES)], tmp_path, **options) as addresses,
        RemoteNetwork.from_pretrained(tmp_path / "model", initial_peers=addresses) as remote,
    ):
        for batch in (1, 3, 2):
            given = inputs(model, batch)
            found: Any = remote(**given)
            assert torch.allclose(found.logits, model(**given).logits, atol=1e-5)
    (weights,) = set(made)
    assert weights.held_bytes <= 0.6 * total


def test_pieces_that_fit_or_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("ViTForImageClassification", tmp_path)
    total = sum(each.nbytes for each in model.parameters()) / 2**30
    config, served = open_model(tmp_path)
    assert served.count_fitting(config) == PIECES
    config, served = open_model(tmp_path, weight_memory_gib=0.8 * total)
    assert 1 < served.count_fitting(config) < PIECES
    config, served = open_model(tmp_path, weight_memory_gib=0.05 * total)
    assert served.count_fitting(config) == 1
    served.require_memory(config, Span(0, PIECES))
    monkeypatch.setattr(GraphModel, "_usable_bytes", lambda _: int(0.04 * total * 2**30))
    with pytest.raises(InsufficientMemoryError, match="--weight-memory-gib"):
        served.count_fitting(config)
    with pytest.raises(InsufficientMemoryError, match="--weight-memory-gib"):
        served.require_memory(config, Span(0, PIECES))


def test_language_models_keep_all_weights(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="for networks in pieces"):
        open_node_model(NodeConfig(model=str(folder), weight_memory_gib=1))
