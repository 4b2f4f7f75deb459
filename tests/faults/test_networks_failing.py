"""Nodes with pieces that die or leave while requests are on their way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nesa_node import RemoteNetwork, SwarmPipeline
from nesa_node.cli.services.local_swarm import LocalNode
from nesa_node.client.graphs.remote_generation import make_generator
from nesa_node.core.ids import Span
from tests.e2e.test_networks import inputs, save
from tests.engine.tiny_pipelines import save_pipeline
from tests.swarms import daemons

PIECES = 4


@pytest.mark.parametrize("ending", ["kill", "terminate"])
@torch.no_grad()
def test_requests_go_on_where_a_node_ends(ending: str, tmp_path: Path) -> None:
    """Both pieces' first nodes end, one after another, while eight threads send requests."""
    model: Any = save("ViTForImageClassification", tmp_path / "model")
    flags = ("--pieces", str(PIECES), "--image-size", "32")
    with ExitStack() as stack:
        swarm = stack.enter_context(daemons(tmp_path / "model", tmp_path, *flags))
        halves = [Span(0, 2), Span(2, PIECES)]
        nodes = swarm.start_all([*halves, *halves])
        end: Callable[[LocalNode], None] = getattr(swarm, ending)
        remote = stack.enter_context(
            RemoteNetwork.from_pretrained(
                tmp_path / "model", initial_peers=nodes[3].addresses, recovery_timeout_s=30
            )
        )
        given = [inputs(model, batch) for batch in range(1, 5)]
        expected = [model(**each).logits for each in given]
        assert torch.allclose(remote(**given[0]).logits, expected[0], atol=1e-5)
        stopping, counts = threading.Event(), [0] * 8

        def send(number: int) -> None:
            while not stopping.is_set():
                at = (counts[number] + number) % len(given)
                found = remote(**given[at]).logits
                assert torch.allclose(found, expected[at], atol=1e-5)
                counts[number] += 1

        with ThreadPoolExecutor(len(counts)) as pool:
            sending = [pool.submit(send, number) for number in range(len(counts))]
            try:
                for node in (nodes[0], nodes[1]):
                    before = sum(counts)
                    end(node)
                    deadline = time.monotonic() + 40
                    while sum(counts) < before + 200:
                        assert time.monotonic() < deadline, "no requests were answered any more"
                        assert not any(each.done() for each in sending)
                        time.sleep(0.05)
            finally:
                stopping.set()
            for each in sending:
                each.result()
        assert min(counts) > 10


@pytest.mark.timeout(180)
@pytest.mark.parametrize("routing", ["chain", "star"])
@torch.no_grad()
def test_texts_go_on_where_a_node_ends(routing: Any, tmp_path: Path) -> None:
    """Nodes that keep a decoder's keys and values die between two tokens."""
    model: Any = save("T5ForConditionalGeneration", tmp_path / "model")
    options: dict[str, Any] = {"max_new_tokens": 24, "num_beams": 3, "decoder_start_token_id": 0}
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, **options)
    with ExitStack() as stack:
        swarm = stack.enter_context(daemons(tmp_path / "model", tmp_path, "--pieces", str(PIECES)))
        halves = [Span(0, 2), Span(2, PIECES)]
        nodes = swarm.start_all([*halves, *halves])
        network = stack.enter_context(
            RemoteNetwork.from_pretrained(
                tmp_path / "model",
                initial_peers=nodes[3].addresses,
                routing=routing,
                recovery_timeout_s=30,
            )
        )
        killed: list[LocalNode] = []

        def kill(tokens_BT: torch.Tensor, _: Any) -> torch.Tensor:
            if tokens_BT.shape[1] in (8, 16):
                node = nodes[len(killed)]
                swarm.kill(node)
                killed.append(node)
            return torch.zeros(len(tokens_BT), dtype=torch.bool)

        generator: Any = make_generator(network)
        made = generator.generate(ids, **options, stopping_criteria=[kill])
        assert len(killed) == 2
    assert made.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_picture_is_the_same_where_nodes_die_between_two_steps(tmp_path: Path) -> None:
    alone = save_pipeline("StableDiffusionPipeline", tmp_path / "model")

    def options() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        return {"num_inference_steps": 5, "output_type": "np", "generator": generator}

    expected = alone("a cat", **options()).images
    with daemons(tmp_path / "model", tmp_path, "--pieces", str(PIECES)) as swarm:
        spans = [Span(piece, piece + 1) for piece in range(PIECES)]
        nodes = swarm.start_all([*spans, Span(1, 3)])
        killed: list[int] = []

        def kill(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            victims = {1: nodes[1], 2: nodes[2]}
            if step in victims:
                swarm.kill(victims[step])
                killed.append(step)
            return tensors

        with SwarmPipeline(
            "text-to-image",
            tmp_path / "model",
            initial_peers=nodes[4].addresses,
            recovery_timeout_s=30,
        ) as remote:
            found = remote("a cat", **options(), callback_on_step_end=kill).images
    assert killed == [1, 2]
    assert np.abs(found - expected).max() < 1 / 255
