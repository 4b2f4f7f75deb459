"""Every family with weights in fewer bits, against transformers with bitsandbytes' weights.

L tokens, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.model.devices import compute_block_bytes
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import Chain, Run, distance, open_local
from tests.engine.model_table import describe_experts
from tests.engine.model_types import tiny_config
from tests.engine.their_layers import quantize
from tests.engine.tiny_models import FAMILIES, prompt_ids, reference, save_tiny_model

TOKENS = 24
SAME = 1e-4
MIXTURES = ["qwen3_moe", "olmoe", "gpt_oss", "llama4_text"]
"""Types whose experts are stacked: as Mixtral's, with biases and interleaved, and transposed."""
MORE_MIXTURES = [
    *("afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1"),
    *("ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite"),
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe"),
    *("hy_v3", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "phimoe", "qwen2_moe", "solar_open"),
]


@torch.inference_mode()
def their_logits(folder: Path, ids: list[int], quant_type: QuantType) -> tuple[Tensor, Tensor]:
    """Of transformers with its own weights and with bitsandbytes', token by token."""
    model = reference(folder)
    plain_LV = model(torch.tensor([ids])).logits[0]
    path = open_local(folder).family.layers_path
    assert quantize(model.get_submodule(path), quant_type) >= 6 * 4
    logits, cache = [], None
    for token in ids:
        output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0])
    return plain_LV, torch.cat(logits)


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("family", [*FAMILIES, "llama_biased", "bloom_post_norm", *MIXTURES])
def test_token_by_token_as_bitsandbytes(
    family: str, quant_type: QuantType, models_dir: Path
) -> None:
    folder, ids = save_tiny_model(family, models_dir), prompt_ids(TOKENS)
    plain_LV, expected_LV = their_logits(folder, ids, quant_type)
    run = Run(Chain(folder, quant_type=quant_type))
    logits_LV = torch.cat([run.step([token]) for token in ids])
    changed = distance(plain_LV, expected_LV)
    assert changed > 30 * SAME
    assert distance(logits_LV, expected_LV) <= SAME


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_a_prompt_in_one_step_is_what_its_tokens_are(
    family: str, quant_type: QuantType, models_dir: Path
) -> None:
    """In int8 bitsandbytes takes columns apart for all tokens together: it is 0.04 to 0.1 off."""
    chain = Chain(save_tiny_model(family, models_dir), quant_type=quant_type)
    ids = prompt_ids(TOKENS)
    one_by_one = Run(chain)
    expected_LV = torch.cat([one_by_one.step([token]) for token in ids])
    assert distance(Run(chain).step(ids), expected_LV) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("model_type", MORE_MIXTURES)
def test_every_mixture_computes_with_bitsandbytes_weights(
    model_type: str, quant_type: QuantType, models_dir: Path
) -> None:
    test_token_by_token_as_bitsandbytes(model_type, quant_type, models_dir)


def test_experts_of_every_served_mixture_are_held_in_fewer_bits() -> None:
    """But for DBRX's, which docs/models.md says."""
    for model_type in (*MIXTURES, *MORE_MIXTURES):
        assert describe_experts(tiny_config(model_type)) == "fewer bits", model_type
    assert describe_experts(tiny_config("dbrx")) == "16 bits"
    assert describe_experts(tiny_config("llama")) == ""


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_mixture_takes_the_bytes_that_were_planned(
    model_type: str, quant_type: QuantType, models_dir: Path
) -> None:
    """One by one in the checkpoint, and stacked."""
    checkpoint = open_local(save_tiny_model(model_type, models_dir))
    span = Span(1, 3)
    plain = compute_block_bytes(checkpoint, torch.bfloat16)
    sizes = compute_block_bytes(checkpoint, torch.bfloat16, quant_type)
    reports: list[tuple[str, int, int]] = []
    blocks = load_blocks(
        checkpoint,
        span,
        dtype=torch.bfloat16,
        device="cpu",
        quant_type=quant_type,
        progress=lambda *report: reports.append(report),
    )
    assert blocks.weight_bytes == sum(sizes[1:3]) < 0.75 * sum(plain[1:3])
    _, done, total = reports[-1]
    assert done == total


def test_nf4_refuses_layers_that_are_no_whole_blocks(models_dir: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("opt", models_dir)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ffn_dim": 127}))
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if "fc1" in name:
            tensors[name] = tensors[name][:127].contiguous()
        elif "fc2.weight" in name:
            tensors[name] = tensors[name][:, :127].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = open_local(tmp_path)
    for attempt in (
        lambda: compute_block_bytes(checkpoint, torch.float32, "nf4"),
        lambda: load_blocks(
            checkpoint, Span(0, 1), dtype=torch.float32, device="cpu", quant_type="nf4"
        ),
    ):
        with pytest.raises(UnsupportedModelError, match="use --quant-type int8"):
            attempt()
    chain = Chain(tmp_path, spans=[Span(0, 6)], quant_type="int8")
    assert Run(chain).step(prompt_ids(5)).isfinite().all()
