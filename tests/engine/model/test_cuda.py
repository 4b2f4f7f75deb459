"""Blocks on a GPU against transformers there, and the figures that the GPU is measured to have.

Skipped where torch sees no CUDA device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.model.devices import free_memory_bytes, measure_throughput, release_memory
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.model.machine_figures import WEIGHT_KINDS, measure_figures
from tests.engine.chained import Chain, Run, distance, forward, new_row, open_local
from tests.engine.tiny_models import FAMILIES, greedy, prompt_ids, reference, save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, models_dir: Path) -> None:
    folder, prompt = save_tiny_model(family, models_dir), prompt_ids(20)
    expected = greedy(reference(folder).to(CUDA), prompt, 24)
    assert Run(Chain(folder, device="cuda")).greedy(prompt, 24, chunk=7) == expected


# bitsandbytes says that so small a model's 96 channels take its slower kernel.
@pytest.mark.filterwarnings("ignore:inner dimension")
@pytest.mark.parametrize("quant_type", ["none", "int8", "nf4"])
def test_outputs_are_those_of_the_cpu(quant_type: QuantType, models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    hidden_LD = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for device in ("cpu", "cuda"):
        blocks = load_blocks(
            checkpoint, Span(0, 3), dtype=torch.float32, device=device, quant_type=quant_type
        )
        row = new_row(blocks, 64)
        parts = [forward(blocks, part, row) for part in torch.split(hidden_LD, [33, 1, 6])]
        outputs.append(torch.cat(parts).cpu())
    assert distance(outputs[1], outputs[0]) < (1e-5 if quant_type == "none" else 1e-2)


def test_memory_is_freed_with_the_span(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    blocks = load_blocks(checkpoint, Span(0, 2), dtype=torch.float32, device=CUDA)
    pool = blocks.new_pool(400_000)
    held = free_memory_bytes(CUDA)
    del blocks, pool
    release_memory()
    assert free_memory_bytes(CUDA) > held + (100 << 20)


def test_figures_of_every_kind_of_weights() -> None:
    figures = measure_figures(CUDA)
    assert figures.keys() == {kind for kind, *_ in WEIGHT_KINDS}
    for kind, each in figures.items():
        assert 1e9 < each.read_bytes_per_s < 2e13, kind
        assert 1e10 < each.flop_per_s < 1e16, kind
        assert 0 <= each.block_overhead_s < 0.05, kind


def test_throughput_is_measured(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    blocks = load_blocks(checkpoint, Span(0, 2), dtype=torch.bfloat16, device=CUDA)
    throughput = measure_throughput(blocks)
    assert throughput.prefill_tokens_per_s > throughput.decode_tokens_per_s > 10
