"""The demo model with hidden inputs of its blocks' products: tokens, logits, each product."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.core.ids import Span
from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.product_check import ProductCheck
from nesa_node.privacy.products import list_products, read_rows
from tests.e2e.test_masked_sessions import with_integers
from tests.privacy.keys import decrypted_products
from tests.same_tokens import assert_same_tokens
from tests.swarms import daemons

README = Path(__file__).parents[2] / "README.md"
BLOCKS = 30
PROMPTS = ("The capital of France is", "def add(a, b):")
NEW = 24
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model_path(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def local(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with daemons(folder, tmp_path_factory.mktemp("swarm"), "--private", "ckks") as swarm:
        swarm.start_all([Span(0, BLOCKS // 2), Span(BLOCKS // 2, BLOCKS)])
        yield swarm.addresses


def private_model(folder: Path, addresses: tuple[str, ...], blocks: int = BLOCKS) -> Any:
    """With the first `blocks` on nodes."""
    return AutoDistributedModelForCausalLM.from_pretrained(
        folder,
        initial_peers=addresses,
        dtype=torch.float32,
        private="ckks",
        client_blocks=(0, BLOCKS - blocks),
    )


def test_tokens_are_those_of_transformers(
    folder: Path, addresses: tuple[str, ...], local: Any, prompts: list[torch.Tensor]
) -> None:
    with private_model(folder, addresses) as model:
        for prompt in prompts:
            tokens = model.generate(prompt, **OPTIONS)
            assert tokens.shape[1] == prompt.shape[1] + NEW
            assert_same_tokens(local, tokens, prompt, **OPTIONS)


def test_logits_are_those_of_transformers(
    folder: Path, addresses: tuple[str, ...], local: Any, prompts: list[torch.Tensor]
) -> None:
    with torch.inference_mode():
        expected = local(prompts[0]).logits
    for blocks in (1, 10, BLOCKS):
        with (
            private_model(folder, addresses, blocks) as model,
            model.inference_session(max_length=16) as session,
        ):
            error = (session.step(prompts[0]) - expected).abs().max() / expected.abs().max()
        print(f"{blocks} blocks encrypted: error of logits {error:.1e} of the largest")
        assert error <= 1e-3


def test_products_of_its_own_activations_are_exact_enough(
    folder: Path, local: Any, prompts: list[torch.Tensor]
) -> None:
    """Of the first token, whose channels are the largest by far, and of another one."""
    ring = make_ring(RingParameters())
    skeleton = Skeleton(open_checkpoint(str(folder), cache_dir=folder))
    inputs = inputs_of_layers(local, prompts[0])
    worst, spread = 0.0, 0.0
    for block in (0, 1, 9, 28, 29):
        for product in list_products(skeleton, Span(block, block + 1)):
            weight = np.concatenate(list(read_rows(skeleton, product)))
            x_TI = inputs[product.paths[0]][[0, 3]]
            scales_T1 = np.abs(x_TI).max(1, keepdims=True)
            layout = plan_layout(sum(product.outputs), product.inputs, ring.parameters.slots)
            scaled_TO = decrypted_products(ring, layout, weight, x_TI / scales_T1)
            assert ProductCheck(ring.parameters, [weight]).accepts(x_TI / scales_T1, scaled_TO)
            y_TO = scaled_TO * scales_T1
            exact_TO = x_TI @ weight.T
            largest_T1 = np.abs(exact_TO).max(1, keepdims=True)
            worst = max(worst, float((np.abs(y_TO - exact_TO) / largest_T1).max()))
            spread = max(spread, float((np.abs(x_TI).max(1) / np.median(np.abs(x_TI), 1)).max()))
    print(f"largest error of a product {worst:.1e}; largest channel {spread:.0f} times the median")
    assert spread > 1000
    assert worst <= 1e-5


def inputs_of_layers(local: Any, prompt: torch.Tensor) -> dict[str, npt.NDArray[np.float64]]:
    found: dict[str, npt.NDArray[np.float64]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, name=name: found.update({name: given[0][0].double().numpy()})
        )
        for name, layer in local.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    with torch.inference_mode():
        local(prompt)
    for hook in hooks:
        hook.remove()
    return found


@pytest.fixture(scope="module")
def integers(local: Any) -> Any:
    return with_integers(copy.deepcopy(local))


def test_masked_tokens_are_those_of_integers(
    folder: Path, integers: Any, prompts: list[torch.Tensor], tmp_path: Path
) -> None:
    with daemons(folder, tmp_path, "--private", "masks") as swarm:
        swarm.start_all([Span(0, BLOCKS // 2), Span(BLOCKS // 2, BLOCKS)])
        with AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=swarm.addresses, dtype=torch.float32, private="masks"
        ) as model:
            for prompt in prompts:
                tokens = model.generate(prompt, **OPTIONS)
                assert tokens.shape[1] == prompt.shape[1] + NEW
                assert_same_tokens(integers, tokens, prompt, **OPTIONS)


@torch.inference_mode()
def test_masked_perplexity_is_that_of_floats(folder: Path, local: Any, integers: Any) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(README.read_text(), return_tensors="pt").input_ids
    ids = ids[:, :500]
    plain, ours = (math.exp(model(ids, labels=ids).loss) for model in (local, integers))
    print(f"perplexity {ours:.4f} of integers, {plain:.4f} of 32-bit floats")
    assert abs(ours / plain - 1) < 1e-3
