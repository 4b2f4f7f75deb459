"""Daemons that hold their weights in fewer bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nesa_node.core.errors import RefusedError
from nesa_node.core.settings.choices import ClientQuantType, QuantType
from tests.client.local_models import random_ids
from tests.e2e.joining import joined
from tests.engine.chained import Chain, Run
from tests.engine.their_layers import quantize
from tests.engine.tiny_models import BLOCKS, greedy, reference
from tests.faults.bed import open_bed
from tests.faults.nursery import open_nursery
from tests.swarms import daemons, thirds

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "quant_type",
    ["int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nf4", "llm_int8"))],
)
def test_a_chain_of_daemons_generates_what_the_quantized_model_does(
    quant_type: QuantType, folder: Path, tmp_path: Path
) -> None:
    ids = random_ids(1, 20)
    prompt = ids[0].tolist()
    expected = Run(Chain(folder, quant_type=quant_type)).greedy(prompt, NEW_TOKENS)
    assert expected != Run(Chain(folder)).greedy(prompt, NEW_TOKENS)
    with open_nursery() as nursery, open_bed(nursery, folder, tmp_path) as bed:
        for node in bed.start(thirds(BLOCKS), "--quant-type", quant_type):
            ready = json.loads(node.ready_path.read_text())
            assert (ready["dtype"], ready["quant_type"]) == ("float32", quant_type)
            assert f"quant_type={quant_type}" in node.log()
        with joined(folder, bed.addresses, "chain") as model:
            ours = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        client_quant_type: ClientQuantType = "nf4" if quant_type == "nf4" else "int8"
        with joined(folder, bed.addresses, "chain", client_quant_type=client_quant_type) as model:
            quantized = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        with (
            pytest.raises(RefusedError, match=f"hold them in {quant_type}, and full was asked for"),
            joined(folder, bed.addresses, "chain", min_precision="full"),
        ):
            pass
    assert isinstance(ours, torch.Tensor)
    assert ours[0, len(prompt) :].tolist() == expected
    everything = Run(Chain(folder, quant_type=quant_type, client_quant_type=client_quant_type))
    assert isinstance(quantized, torch.Tensor)
    assert quantized[0, len(prompt) :].tolist() == everything.greedy(prompt, NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nodes_of_different_precision_serve_one_model(folder: Path, tmp_path: Path) -> None:
    ids = random_ids(1, 20)
    with daemons(folder, tmp_path) as nodes:
        first, *others = thirds(BLOCKS)
        nodes.start(first, "--quant-type", "int8")
        nodes.start_all(others)
        with joined(folder, nodes.addresses, "chain") as model:
            ours = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert isinstance(ours, torch.Tensor)
    assert ours.shape == (1, 24)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_mixture_generates_what_transformers_does_with_bitsandbytes_weights(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    mixture = tiny("qwen3_moe")
    ids = random_ids(1, 20)
    prompt = ids[0].tolist()
    model = reference(mixture)
    plain = greedy(model, prompt, NEW_TOKENS)
    quantize(model.get_submodule("model.layers"), "int8")
    expected = greedy(model, prompt, NEW_TOKENS)
    assert expected != plain
    with daemons(mixture, tmp_path) as nodes:
        for span in thirds(BLOCKS):
            nodes.start(span, "--quant-type", "int8")
        with joined(mixture, nodes.addresses, "chain") as ours:
            found = ours.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert isinstance(found, torch.Tensor)
    assert found[0, len(prompt) :].tolist() == expected
