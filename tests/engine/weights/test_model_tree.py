"""Models that are in no table: what their module tree says, and that it is enough to serve them.

L tokens, V vocabulary.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import initialization as init

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights import model_tree
from nesa_node.engine.weights.families import CacheHeads
from nesa_node.engine.weights.language_models import find_family, is_language_model
from tests.engine.chained import Chain, Run, distance, open_local
from tests.engine.layouts import rewritten, set_config
from tests.engine.model_types import BLOCKS, CAUSAL_TYPES, WINDOW, tiny_config
from tests.engine.tiny_models import (
    LEAST_DISTINCT,
    NEW_TOKENS,
    greedy,
    prompt_ids,
    reference,
    save_tiny_model,
)

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE
"""As in `test_families.py`."""
ROOT = Path(__file__).parents[3]

DIVERSE = ["granite", "deepseek_v3", "gpt_oss", "cohere2", "llama4_text", "mimo_v2_flash"]
"""Scaled embeddings and logits; latents; sinks; layers without rotary; chunks; unequal heads."""


@cache
def _chain(model_type: str, models_dir: Path) -> tuple[Chain, Any]:
    folder = save_tiny_model(model_type, models_dir)
    return Chain(folder), reference(folder)


@torch.inference_mode()
def _logits(model: Any, tokens: list[int]) -> Tensor:
    logits_LV: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits_LV


@pytest.mark.parametrize("model_type", DIVERSE)
def test_three_spans_decode_as_the_whole_model(model_type: str, models_dir: Path) -> None:
    chain, model = _chain(model_type, models_dir)
    prompt = prompt_ids(700)
    new = Run(chain).greedy(prompt, NEW_TOKENS, chunk=193)
    assert new == greedy(model, prompt, NEW_TOKENS)
    assert len(set(new)) >= LEAST_DISTINCT
    expected_LV = _logits(model, prompt + new)
    run = Run(chain)
    parts = [prompt, new[:5], *([token] for token in new[5:])]
    assert distance(torch.cat([run.step(part) for part in parts]), expected_LV) <= TOLERANCE


@pytest.mark.parametrize("model_type", DIVERSE)
def test_rows_of_one_step_do_not_see_each_other(model_type: str, models_dir: Path) -> None:
    chain, model = _chain(model_type, models_dir)
    texts = [prompt_ids(length, seed=length) for length in (5, WINDOW + 20, 17)]
    hidden = [chain.embedder(torch.tensor(text), 0) for text in texts]
    for blocks in chain.blocks:
        reservation = blocks.new_pool(1024).reserve(16)
        runs = []
        for text in texts:
            table = reservation.new_table()
            table.reserve(len(text))
            runs.append(RowChunk(table, len(text)))
        hidden = list(
            torch.split(blocks.forward(torch.cat(hidden), runs), [len(text) for text in texts])
        )
    for text, hidden_LD in zip(texts, hidden, strict=True):
        assert distance(chain.head(hidden_LD), _logits(model, text)) <= TOLERANCE


@pytest.mark.parametrize("model_type", DIVERSE)
def test_a_dropped_block_and_a_shifted_position_are_caught(
    model_type: str, models_dir: Path
) -> None:
    chain, model = _chain(model_type, models_dir)
    prompt = prompt_ids(3 * WINDOW)
    expected_LV = _logits(model, prompt)
    first, second, third = chain.blocks
    shorter = second.select(Span(second.span.start, second.span.end - 1))
    wrong = Run(chain, blocks=[first, shorter, third]).step(prompt)
    assert distance(wrong, expected_LV) > VISIBLE
    run = Run(chain)
    run.step([*prompt[:50], 7])
    run.rollback(50)
    run.length = 51
    for table in run.tables:
        table.length = 51
    assert distance(run.step(prompt[50:]), expected_LV[50:]) > VISIBLE


def test_embedding_and_head_of_several_sequences(models_dir: Path) -> None:
    chain, model = _chain("granite", models_dir)
    rows = torch.tensor([prompt_ids(9, seed=seed) for seed in range(2)])
    positions = torch.arange(9).expand(2, -1)
    batch_RLD = chain.embedder.embed_batch(rows, positions)
    assert torch.equal(batch_RLD[1], chain.embedder(rows[1], 0))
    assert torch.equal(chain.embedder.embed_rows(rows[:, 3], positions[:, 3])[0], batch_RLD[0, 3])
    run = Run(chain)
    run.step(rows[0].tolist())
    hidden_LD = torch.randn(4, model.config.hidden_size)
    logits_LV = chain.head.logits_with_gradients(hidden_LD)
    assert distance(logits_LV, chain.head(hidden_LD)) <= TOLERANCE
    with torch.no_grad():
        expected_LD = model.model.norm(hidden_LD)
    assert torch.equal(chain.head.apply_final_norm(hidden_LD), expected_LD)


def test_latents_are_cached_in_place_of_keys_and_values(models_dir: Path) -> None:
    chain, _ = _chain("deepseek_v3", models_dir)
    config: Any = tiny_config("deepseek_v3")
    latents = CacheHeads(1, config.kv_lora_rank, values=(1, config.qk_rope_head_dim))
    assert find_family(config).list_cache_heads(config) == (latents,) * BLOCKS
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert chain.blocks[0].cache_bytes_per_token == 2 * 4 * width


def test_caches_of_unequal_blocks_are_handed_over(models_dir: Path) -> None:
    chain, _ = _chain("mimo_v2_flash", models_dir)
    shapes = {heads.shapes for blocks in chain.blocks for heads in blocks._cache_heads}
    assert len(shapes) > 1
    for blocks in chain.blocks:
        donor, taker = (blocks.new_pool(96) for _ in range(2))
        for side in donor.tensors:
            side.normal_()
        tokens = donor.export_tokens(slice(3, 40), blocks.span)
        assert tokens.shape == donor.export_shape(37, blocks.span)
        taker.import_tokens(slice(50, 87), blocks.span, tokens)
        for one, other in zip(
            donor.tensors,
            taker.tensors,
            strict=True,
        ):
            assert torch.equal(one[3:40], other[50:87])


@pytest.mark.parametrize(
    ("model_type", "together"),
    [
        *((name, True) for name in ("granite", "cohere2", "qwen3_moe", "gpt_oss")),
        # Latents are no keys, chunks are no windows, and values are repeated after they are cached.
        *((name, False) for name in ("deepseek_v3", "llama4_text", "diffllama")),
    ],
)
def test_rows_run_together_where_pages_can_stand_in(model_type: str, together: bool) -> None:
    assert find_family(tiny_config(model_type)).packs_rows is together


@pytest.mark.parametrize(
    ("model_type", "router", "reads"),
    [
        ("qwen3_moe", "mlp.gate", True),
        ("gpt_oss", "mlp.router", True),
        ("deepseek_v3", "mlp.gate", False),  # corrected scores choose
        ("granite", None, True),
    ],
)
def test_routers_are_found(model_type: str, router: str | None, reads: bool) -> None:
    family = find_family(tiny_config(model_type))
    assert (family.router, family.reads_router) == (router, reads)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "recurrent layers"),
        ("qwen3_next", "recurrent layers"),
        ("bert", "an encoder"),
        ("bart", "an encoder-decoder"),
        ("trocr", "attend to an encoder"),
        ("gemma3", "several networks"),
        ("gemma3n_text", "more than one hidden state"),
        ("deepseek_v32", "an index"),
        ("zamba2", "original_hidden_states"),
        ("openai-gpt", "between layers"),
        ("xlm", "stacks of 6 layers"),
    ],
)
def test_other_models_are_refused_with_the_reason(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    config = tiny_config(model_type)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        open_local(tmp_path)
    assert "\n" not in str(caught.value)
    assert not is_language_model(tmp_path, name="m")


def test_a_causal_decoder_in_no_table_is_a_language_model(tmp_path: Path) -> None:
    tiny_config("granite").save_pretrained(tmp_path)
    assert is_language_model(tmp_path, name="m")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = ["GraniteForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not is_language_model(tmp_path, name="m")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts", "num_experts"])
def test_a_config_that_asks_for_a_billion_modules_is_refused(key: str, tmp_path: Path) -> None:
    tiny_config("qwen2_moe").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: 10**9}))
    with pytest.raises(CorruptCheckpointError, match=key):
        open_local(tmp_path)


def test_sizes_of_a_config_take_no_memory() -> None:
    config: Any = tiny_config("granite")
    config.vocab_size, config.intermediate_size = 1 << 40, 1 << 40
    assert find_family(config).list_cache_heads(config) == (CacheHeads(2, 16),) * BLOCKS


def test_tables_of_any_size_are_not_made(models_dir: Path, tmp_path: Path) -> None:
    """GPT-Neo has a mask of all pairs of positions."""
    folder = rewritten(save_tiny_model("gpt_neo", models_dir), tmp_path / "m")
    set_config(folder, max_position_embeddings=1 << 20)
    with pytest.raises(UnsupportedModelError, match="would take more than 1024 MiB"):
        load_blocks(open_local(folder), Span(0, 1), dtype=torch.float32, device="cpu")


def test_docs_list_every_causal_type_once() -> None:
    rows = [
        line.split("|")[1].strip().strip("`")
        for line in (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert sorted(rows) == CAUSAL_TYPES


def test_models_loaded_beside_leave_initializers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers replaces torch's initializers for all threads while it loads a model."""
    kept = torch.nn.init.normal_
    make, beside = model_tree._AUTO.from_config, init.guard_torch_init_functions()

    def make_while_another_loads(*args: Any, **options: Any) -> Any:
        beside.__enter__()
        return make(*args, **options)

    monkeypatch.setattr(model_tree._AUTO, "from_config", make_while_another_loads)
    model_tree.make_empty_model(tiny_config("llama"))
    beside.__exit__(None, None, None)
    assert torch.nn.init.normal_ is kept
