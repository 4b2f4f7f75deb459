from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from nesa_node.core.errors import InsufficientMemoryError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.model.devices import (
    RESERVE_BYTES,
    cache_bytes_per_token,
    compute_block_bytes,
    fit_blocks,
    free_memory_bytes,
    require_room_for_embedder_and_head,
)
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from tests.cli.tiny import write_tiny_model
from tests.engine.chained import open_local
from tests.engine.own_process import figures
from tests.engine.tiny_models import FAMILIES, save_tiny_model


@pytest.mark.parametrize("quant_type", get_args(QuantType))
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_take_what_was_foretold(
    family: str, quant_type: QuantType, models_dir: Path
) -> None:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    sizes = compute_block_bytes(checkpoint, torch.bfloat16, quant_type)
    blocks = load_blocks(
        checkpoint, Span(1, 3), dtype=torch.bfloat16, device="cpu", quant_type=quant_type
    )
    assert blocks.weight_bytes == sizes[1] + sizes[2]
    assert blocks.cache_bytes_per_token == 2 * cache_bytes_per_token(checkpoint, torch.bfloat16)


def test_as_many_blocks_as_fit_beside_their_cache(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    block = compute_block_bytes(checkpoint, torch.float32)[0]
    cache = 1000 * cache_bytes_per_token(checkpoint, torch.float32)
    for room in range(1, 9):
        free = RESERVE_BYTES + room * (block + cache) + 5
        fit = fit_blocks(
            checkpoint, dtype=torch.float32, device="cpu", cache_tokens=1000, free_bytes=free
        )
        assert fit.blocks == min(room, 6)
        assert (fit.bytes_per_block, fit.cache_bytes_per_block) == (block, cache)


def test_a_tenth_of_a_large_memory_stays_free(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    free = 100 * RESERVE_BYTES
    tokens = free * 19 // 100 // cache_bytes_per_token(checkpoint, torch.float32)
    fit = fit_blocks(
        checkpoint, dtype=torch.float32, device="cpu", cache_tokens=tokens, free_bytes=free
    )
    # 0.9 / 0.19 is 4.7, and 0.99 / 0.19 is 5.2: 256 MiB are a hundredth.
    assert fit.blocks == 4


def test_more_blocks_fit_in_fewer_bits(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    room = RESERVE_BYTES + 3 * compute_block_bytes(checkpoint, torch.float32)[0]
    fitting = {
        quant_type: fit_blocks(
            checkpoint,
            dtype=torch.float32,
            device="cpu",
            cache_tokens=1,
            quant_type=quant_type,
            free_bytes=room,
        ).blocks
        for quant_type in get_args(QuantType)
    }
    assert fitting == {"none": 2, "int8": 6, "nf4": 6, "llm_int8": 6}


def test_too_little_memory_for_one_block_says_so(models_dir: Path) -> None:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    with pytest.raises(InsufficientMemoryError, match="one block of llama-6-0 takes"):
        fit_blocks(
            checkpoint,
            dtype=torch.float32,
            device="cpu",
            cache_tokens=10,
            free_bytes=RESERVE_BYTES + 1000,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_a_strangers_model_take_half_of_what_is_free(
    family: str, models_dir: Path
) -> None:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    embedder, head = load_embedder_and_head(checkpoint, dtype=torch.float32, device="cpu")
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for module in (
            *(embedder.token_embedding, embedder._projection_in, embedder._positions),
            embedder._norm,
            *(*head._final_modules, head.lm_head),
        )
        if module is not None
        for tensor in module.state_dict().values()
    }
    needed = sum(tensors.values()) + max(tensors.values())
    ask = partial(
        require_room_for_embedder_and_head,
        checkpoint,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    ask(free_bytes=RESERVE_BYTES + 2 * needed)
    with pytest.raises(InsufficientMemoryError, match="--model"):
        ask(free_bytes=RESERVE_BYTES + 2 * needed - 2)


def test_bytes_are_no_embedding(tmp_path: Path) -> None:
    """They would take four times as much memory as the disk limit lets them have."""
    folder = write_tiny_model(tmp_path / "tiny")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].to(torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="integers"):
        require_room_for_embedder_and_head(
            open_local(folder), dtype=torch.float32, device=torch.device("cpu")
        )


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    unlimited = free_memory_bytes("cpu", cgroup=tmp_path / "none")
    assert unlimited > 1 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert free_memory_bytes("cpu", cgroup=tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes("cpu", cgroup=tmp_path) > 1 << 20


def test_loading_a_third_peaks_at_little_more_than_the_third(tmp_path: Path) -> None:
    """Of 30 blocks; in a process of its own, since a peak never falls."""
    lines = figures(
        "peak_memory",
        tmp_path / "m",
        "10:20",
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=30,
        num_attention_heads=6,
    )
    [(before, after, weights, _)] = lines
    assert weights > 60 << 20
    assert after - before <= 1.3 * weights


@pytest.mark.parametrize("quant_type", ["int8", "nf4"])
def test_loading_in_fewer_bits_peaks_at_a_layer_more_than_the_span(
    quant_type: str, tmp_path: Path
) -> None:
    lines = figures(
        "peak_memory",
        tmp_path / "m",
        "1:11",
        quant_type,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=11,
        num_attention_heads=16,
    )
    [(before, after, weights, layer)] = lines
    assert weights > 65 << 20
    assert after - before <= 1.05 * weights + layer


@pytest.mark.slow
def test_steps_of_ever_new_lengths_do_not_add_up(models_dir: Path) -> None:
    """What oneDNN compiles for each length is let go again."""
    folder = save_tiny_model("llama", models_dir)
    program = [sys.executable, "-m", "tests.engine.many_lengths", str(folder)]
    result = subprocess.run(program, check=True, capture_output=True, text=True)
    before, after = (int(line) for line in result.stdout.split())
    assert after - before < 40 << 20
