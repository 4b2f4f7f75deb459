"""Networks of many kinds, cut into pieces over nodes, give what transformers gives."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils import _pytree as pytree

from nesa_node.client.graphs import graph_link
from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.ids import Span, split_evenly
from nesa_node.server.graphs.graph_server import GraphServer
from tests.engine.graphs.test_model_graph import MODELS
from tests.swarms import in_process_swarm

pytestmark = pytest.mark.timeout(300)  # each node captures the network
PIECES = 5


def save(name: str, folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model: Any = getattr(transformers, name)(copy.deepcopy(MODELS[name]))
    model.save_pretrained(folder)
    model.eval()
    made: transformers.PreTrainedModel = model
    return made


def inputs(model: Any, batch: int, length: int = 9) -> dict[str, Tensor]:
    torch.manual_seed(batch)
    ids = torch.randint(5, 90, (batch, length))
    image = torch.randn(batch, 3, 32, 32)
    match type(model).__name__:
        case "ViTForImageClassification" | "ResNetForImageClassification":
            return {"pixel_values": image}
        case "CLIPModel":
            return {"pixel_values": image, "input_ids": ids}
        case "WhisperForConditionalGeneration":
            return {"input_features": torch.randn(batch, 80, 3000), "decoder_input_ids": ids}
        case "T5ForConditionalGeneration":
            return {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tensors(output: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor)]


@pytest.fixture(scope="module", params=MODELS)
def network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[transformers.PreTrainedModel, RemoteNetwork]]:
    folder = tmp_path_factory.mktemp("network")
    model = save(request.param, folder / "model")
    spans = split_evenly(PIECES, 3)
    options = {"pieces": PIECES, "image_size": 32}
    with (
        in_process_swarm(folder / "model", spans, folder, **options) as addresses,
        RemoteNetwork.from_pretrained(folder / "model", initial_peers=addresses) as remote,
    ):
        assert len(remote.connection.plan.pieces) == PIECES  # joins
        yield model, remote


@torch.no_grad()
def test_outputs_are_those_of_the_whole_model(
    network: tuple[transformers.PreTrainedModel, RemoteNetwork],
) -> None:
    model, remote = network
    for batch in (1, 3):
        given = inputs(model, batch)
        expected = model(**given, **({"use_cache": False} if "input_ids" in given else {}))
        found = remote(**given)
        assert type(found) is type(expected)
        for one, other in zip(tensors(expected), tensors(found), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


@torch.no_grad()
def test_many_requests_at_once(
    network: tuple[transformers.PreTrainedModel, RemoteNetwork],
) -> None:
    model, remote = network
    every = [inputs(model, batch) for batch in (1, 2, 3, 4, 1, 2, 3, 4)]
    with ThreadPoolExecutor(len(every)) as pool:
        found = list(pool.map(lambda given: remote(**given), every))
    for given, output in zip(every, found, strict=True):
        expected = model(**given, **({"use_cache": False} if "input_ids" in given else {}))
        assert torch.allclose(tensors(expected)[0], tensors(output)[0], atol=1e-5)


@torch.no_grad()
def test_a_node_that_answers_pings_alone_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save("ViTForImageClassification", tmp_path / "model")
    stuck: list[GraphServer] = []
    compute = GraphServer._compute

    async def compute_or_not(self: GraphServer, *args: Any) -> Any:
        if not stuck:
            stuck.append(self)
        if self is stuck[0]:
            await asyncio.sleep(1000)
        return await compute(self, *args)

    monkeypatch.setattr(GraphServer, "_compute", compute_or_not)
    monkeypatch.setattr(graph_link, "MAX_ANSWER_S", 2.0)
    options = {"pieces": 2, "image_size": 32, "drain_timeout_s": 0.1}
    with (
        in_process_swarm(tmp_path / "model", [Span(0, 2)] * 2, tmp_path, **options) as addresses,
        RemoteNetwork.from_pretrained(tmp_path / "model", initial_peers=addresses) as remote,
    ):
        given = inputs(model, 2)
        found: Any = remote(**given)
        assert torch.allclose(found.logits, model(**given).logits, atol=1e-5)
    assert stuck
