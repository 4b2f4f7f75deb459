"""Checkpoints whose weights are stored in few bits, against transformers with what they stand for.

L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config
from transformers.utils.quantization_config import Mxfp4Config

from nesa_node.core.ids import Span
from nesa_node.engine.model.devices import compute_block_bytes
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import compute_model_id, hash_tensor
from nesa_node.engine.weights.model_folder import write_model
from nesa_node.engine.weights.weights_root import hash_span, span_tensors
from nesa_node.verification.attestation.binding import weights_root
from tests.engine.chained import Chain, Run, distance, open_local
from tests.engine.stored_weights import KINDS, StoredModel, write_quantized
from tests.engine.tiny_models import greedy, prompt_ids, reference
from tests.first_is_fast import first_is_fast

AUTO: Any = AutoModelForCausalLM
SAME = 1e-5
TOKENS = 40


@pytest.fixture
def make(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., StoredModel]:
    def write(kind: str, **settings: object) -> StoredModel:
        family, pack, config = KINDS[kind]
        return write_quantized(tiny(family), tmp_path, pack, config, **settings)

    return write


@pytest.mark.parametrize("kind", first_is_fast(*KINDS))
@torch.inference_mode()
def test_spans_compute_what_the_dequantized_model_does(
    kind: str, make: Callable[..., StoredModel]
) -> None:
    model = make(kind)
    alone, ids = reference(model.plain), prompt_ids(TOKENS)
    chain = Chain(model.folder)
    expected_LV = alone(torch.tensor([ids])).logits[0]
    assert distance(Run(chain).step(ids), expected_LV) <= SAME
    assert Run(chain).greedy(ids, 16) == greedy(alone, ids, 16)


OWN: dict[str, dict[str, Any]] = {
    "compressed int4 with zero points": {
        "quantization_config": CompressedTensorsConfig(dequantize=True)
    },
    "fp8 in blocks": {"quantization_config": FineGrainedFP8Config(dequantize=True)},
    "mxfp4": {"quantization_config": Mxfp4Config(dequantize=True)},
}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("kind", first_is_fast(*OWN))
@torch.inference_mode()
def test_logits_are_those_of_transformers_own_quantizer(
    kind: str, make: Callable[..., StoredModel]
) -> None:
    folder, ids = make(kind).folder, prompt_ids(TOKENS)
    options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    alone: Any = AUTO.from_pretrained(folder, **options, **OWN[kind]).eval()
    expected_LV = alone(torch.tensor([ids])).logits[0]
    assert distance(Run(Chain(folder)).step(ids), expected_LV) <= SAME


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_is_what_it_stands_for(kind: str, make: Callable[..., StoredModel]) -> None:
    model = make(kind)
    found, plain = open_local(model.folder), open_local(model.plain)
    assert found.tensors.keys() >= plain.tensors.keys()
    for name, info in plain.tensors.items():
        assert (found.tensors[name].shape, found.tensors[name].dtype) == (info.shape, info.dtype)
        assert torch.equal(found.read(name), plain.read(name)), name


def test_weights_are_rounded_once_to_the_models_dtype(make: Callable[..., StoredModel]) -> None:
    model = make("awq", dtype="bfloat16")
    found, plain = open_local(model.folder), open_local(model.plain)
    name = "model.layers.3.mlp.up_proj.weight"
    assert found.resolve_dtype("auto") == torch.bfloat16
    assert torch.equal(found.read(name), plain.read(name).bfloat16())


def test_without_a_dtype_in_the_config_that_of_scales_is_taken(
    make: Callable[..., StoredModel],
) -> None:
    found = open_local(make("awq", dtype=...).folder)
    assert found.tensors["model.layers.3.mlp.up_proj.weight"].dtype == torch.float16


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_weights_are_held_as_asked(quant_type: Any, make: Callable[..., StoredModel]) -> None:
    model = make("gptq in 4 bits")
    ids = prompt_ids(12)
    found, expected = (
        Run(Chain(folder, quant_type=quant_type)).step(ids)
        for folder in (model.folder, model.plain)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("quant_type", ["none", "int8"])
def test_blocks_are_planned_as_they_are_held(
    quant_type: Any, make: Callable[..., StoredModel]
) -> None:
    model = make("gptq in 4 bits")
    found, expected = (
        compute_block_bytes(open_local(folder), torch.float32, quant_type)
        for folder in (model.folder, model.plain)
    )
    assert found == expected


def test_roots_are_of_the_values_that_weights_stand_for(make: Callable[..., StoredModel]) -> None:
    model, span = make("fp8 in blocks"), Span(1, 3)
    found, plain = open_local(model.folder), open_local(model.plain)
    names = span_tensors(found, span)
    assert names == span_tensors(plain, span)
    expected = weights_root({name: hash_tensor(plain.read(name)) for name in names})
    found.read_digests = {}
    load_blocks(found, span, dtype=torch.bfloat16, device="cpu")
    assert weights_root(found.read_digests) == expected == hash_span(found, span, {})


def test_a_quantized_model_has_an_id_of_its_own(make: Callable[..., StoredModel]) -> None:
    model = make("gptq in 4 bits")
    ids = [compute_model_id(open_local(folder)) for folder in (model.folder, model.plain)]
    assert ids[0] != ids[1]
    assert ids[0].partition("@")[0] == ids[1].partition("@")[0]


def test_a_models_id_is_of_its_quantization_config(make: Callable[..., StoredModel]) -> None:
    """In the second version of GPTQ's files the same zero points are others."""
    first = make("gptq in 4 bits").folder
    before = compute_model_id(open_local(first))
    config = open_local(first).folder / "config.json"
    config.write_text(config.read_text().replace('"quant_method": "gptq"', SECOND))
    assert compute_model_id(open_local(first)) != before


SECOND = '"quant_method": "gptq", "checkpoint_format": "gptq_v2"'


def test_a_trained_model_is_written_with_whole_weights(
    make: Callable[..., StoredModel], tmp_path: Path
) -> None:
    model = make("awq")
    found, plain = open_local(model.folder), open_local(model.plain)
    blocks = {name: plain.read(name) for name in plain.tensors if ".layers." in name}
    write_model(tmp_path / "trained", found, blocks, torch.float32)
    written = open_local(tmp_path / "trained")
    assert written.stored_format is None
    assert all(torch.equal(written.read(name), plain.read(name)) for name in plain.tensors)
