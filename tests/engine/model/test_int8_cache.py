"""Spans whose KV cache is in 8 bits, against transformers with such a cache of its own.

L tokens, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.engine.cache import cache_side, paged_attention
from nesa_node.engine.model.devices import cache_bytes_per_token
from tests.engine.chained import Chain, Run, distance, fork, forward, new_row, open_local
from tests.engine.int8_cache import Int8DynamicCache
from tests.engine.tiny_models import (
    FAMILIES,
    greedy,
    prompt_ids,
    reference,
    save_tiny_model,
)

TOLERANCE = 2e-3
"""Of the largest logit. A last bit can round a cached value to its next level, an 127th of the
largest; what tells a wrong scale or slot from that is `VISIBLE`."""
VISIBLE = 10 * TOLERANCE
DIVERSE = ["deepseek_v3", "gpt_oss", "cohere2", "llama4_text", "mimo_v2_flash"]
"""Latents; sinks; layers without rotary; chunks; unequal heads."""


@cache
def _chain(family: str, models_dir: Path) -> tuple[Chain, Any]:
    folder = save_tiny_model(family, models_dir)
    return Chain(folder, cache_dtype="int8"), reference(folder)


@torch.inference_mode()
def _logits(model: Any, tokens: list[int], *, is_int8: bool = True) -> Tensor:
    options = {"past_key_values": Int8DynamicCache(), "use_cache": True} if is_int8 else {}
    logits_LV: Tensor = model(torch.tensor([tokens]), **options).logits[0]
    return logits_LV


@pytest.mark.parametrize("family", [*FAMILIES, *DIVERSE])
def test_three_spans_compute_what_transformers_does_with_such_a_cache(
    family: str, models_dir: Path
) -> None:
    chain, model = _chain(family, models_dir)
    prompt, new = prompt_ids(150), prompt_ids(12, seed=4)
    expected_LV = _logits(model, prompt + new)
    run = Run(chain)
    logits = [run.step(prompt[:90]), run.step(prompt[90:])]
    logits += [run.step([token]) for token in new[:8]]
    logits.append(run.step(new[8:]))
    found_LV = torch.cat(logits)
    assert distance(found_LV, expected_LV) <= TOLERANCE
    plain_LV = _logits(model, prompt + new, is_int8=False)
    # Without 8 bits it is another model's.
    assert distance(found_LV, expected_LV) <= distance(found_LV, plain_LV) / 4


def test_wrong_scales_would_be_seen(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, model = _chain("gemma3", models_dir)
    prompt = prompt_ids(150)
    expected_LV = _logits(model, prompt)
    right = cache_side.dequantize_heads

    def shifted(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return right(codes, scales.roll(1, -1), dtype)

    monkeypatch.setattr(paged_attention, "dequantize_heads", shifted)
    assert distance(Run(chain).step(prompt), expected_LV) > VISIBLE


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_new", "gpt_oss"])
def test_heads_that_are_dequantized_one_at_a_time_give_the_same(
    family: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, _ = _chain(family, models_dir)
    prompt = prompt_ids(150)
    whole_LV = Run(chain).step(prompt)
    monkeypatch.setattr(paged_attention, "MAX_DEQUANTIZED_BYTES", 1)
    assert distance(Run(chain).step(prompt), whole_LV) <= TOLERANCE


def test_tokens_are_those_of_transformers_with_such_a_cache(models_dir: Path) -> None:
    chain, model = _chain("llama", models_dir)
    prompt = prompt_ids(80, seed=1)
    with torch.inference_mode():
        output_BL = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            past_key_values=Int8DynamicCache(),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )
    assert Run(chain).greedy(prompt, 40) == output_BL[0, len(prompt) :].tolist()
    assert output_BL[0, len(prompt) :].tolist() != greedy(model, prompt, 40)


def test_a_rollback_and_a_fork_go_on_with_what_is_cached(models_dir: Path) -> None:
    chain, _ = _chain("llama", models_dir)
    prompt = prompt_ids(70)
    run = Run(chain)
    run.step(prompt)
    expected_LV = run.step([5, 6])
    run.rollback(50)
    run.step(prompt[50:])
    assert distance(run.step([5, 6]), expected_LV) <= TOLERANCE
    twin = Run(chain)
    twin.tables, twin.length = [fork(table) for table in run.tables], run.length
    run.step([9])
    twin.step([7])
    again = Run(chain)
    again.step([*prompt, 5, 6, 7])
    assert distance(twin.step([8]), again.step([8])) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "mimo_v2_flash"])
def test_a_cache_takes_what_planning_counts(family: str, models_dir: Path) -> None:
    chain, _ = _chain(family, models_dir)
    checkpoint = open_local(save_tiny_model(family, models_dir))
    for blocks in chain.blocks:
        pool = blocks.new_pool(96)
        taken = sum(tensor.nbytes for tensor in pool.tensors)
        assert taken == 96 * blocks.cache_bytes_per_token
        assert taken == 96 * pool.slot_bytes(blocks.span)
        planned = len(blocks.span) * cache_bytes_per_token(checkpoint, torch.float32, "int8")
        assert blocks.cache_bytes_per_token <= planned
        assert blocks.cache_bytes_per_token < 0.32 * blocks.full_cache_bytes_per_token
        part = blocks.select(type(blocks.span)(blocks.span.start, blocks.span.start + 1))
        assert part.new_pool(32).cache_dtype == "int8"


def test_a_prompt_in_chunks_fills_the_same_pages(models_dir: Path) -> None:
    """Attention reads what is cached, of a chunk's own tokens too."""
    chain, _ = _chain("llama", models_dir)
    blocks = chain.blocks[0]
    hidden_LD = torch.randn(100, blocks.hidden_size)
    whole, parts = new_row(blocks), new_row(blocks)
    expected_LD = forward(blocks, hidden_LD, whole)
    chunks = torch.split(hidden_LD, [40, 33, 1, 1, 25])
    found_LD = torch.cat([forward(blocks, chunk_LD, parts) for chunk_LD in chunks])
    assert distance(found_LD, expected_LD) <= TOLERANCE
    pages = [
        row.pool.export_bytes(row.slots(0, 100), blocks.span).view(torch.int8)
        for row in (whole, parts)
    ]
    # Of the first block all are the same but for last bits before rounding.
    assert (pages[0] != pages[1]).float().mean() < 0.01
