"""Checkpoints that say the same in another way, and those that lack something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.core.ids import Span
from nesa_node.engine.model.embedder_and_head import Head, load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import Chain, Run, distance, open_local
from tests.engine.layouts import Tensors, rewritten, set_config
from tests.engine.tiny_models import prompt_ids, reference, save_tiny_model

PROMPT = prompt_ids(40)
CPU = {"dtype": torch.float32, "device": "cpu"}


def without_prefix(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.removeprefix(prefix): t for name, t in tensors.items()}


def with_prefix(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name if name.startswith("lm_head") else f"{prefix}{name}": t for name, t in tensors.items()
    }


def with_old_buffers(tensors: Tensors) -> Tensors:
    junk = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(6)}
    junk |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(6)}
    return tensors | junk


def with_fused_experts(tensors: Tensors) -> Tensors:
    """The layout in memory, which some versions of transformers 5 have saved as it is."""
    kept = {
        name.replace("block_sparse_moe", "mlp"): tensor
        for name, tensor in tensors.items()
        if ".experts." not in name
    }
    for layer in range(6):
        old, new = f"model.layers.{layer}.block_sparse_moe.experts", f"model.layers.{layer}.mlp"

        def stacked(weight: str, old: str = old) -> torch.Tensor:
            return torch.stack([tensors[f"{old}.{expert}.{weight}.weight"] for expert in range(4)])

        kept[f"{new}.experts.gate_up_proj"] = torch.cat([stacked("w1"), stacked("w3")], 1)
        kept[f"{new}.experts.down_proj"] = stacked("w2")
    return kept


def with_renamed_head(tensors: Tensors) -> Tensors:
    return {name.replace("embed_out.", "lm_head."): tensor for name, tensor in tensors.items()}


LAYOUTS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "gpt2_as_on_the_hub": ("gpt2", without_prefix("transformer.")),
    "gpt2_with_masks": ("gpt2", with_old_buffers),
    "bloom_as_on_the_hub": ("bloom", without_prefix("transformer.")),
    "opt_without_model": ("opt", without_prefix("model.")),
    "llama_without_model": ("llama", without_prefix("model.")),
    "mixtral_fused": ("mixtral", with_fused_experts),
    "gpt_neox_new_head": ("gpt_neox", with_renamed_head),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_logits(layout: str, models_dir: Path, tmp_path: Path) -> None:
    family, change = LAYOUTS[layout]
    folder = save_tiny_model(family, models_dir)
    changed = rewritten(folder, tmp_path / "changed", change)
    names = set(load_file(changed / "model.safetensors"))
    assert names != set(load_file(folder / "model.safetensors"))
    assert torch.equal(Run(Chain(changed)).step(PROMPT), Run(Chain(folder)).step(PROMPT))


def test_mixtral_on_disk_has_an_expert_per_tensor(models_dir: Path) -> None:
    """What `save_tiny_model` and the hub have; the fused layout is tested above."""
    tensors = open_local(save_tiny_model("mixtral", models_dir)).tensors
    assert "model.layers.5.block_sparse_moe.experts.3.w2.weight" in tensors


def test_a_sharded_checkpoint_equals_one_file(models_dir: Path, tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", models_dir)
    reference(folder).save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert torch.equal(
        Run(Chain(tmp_path / "shards")).step(PROMPT), Run(Chain(folder)).step(PROMPT)
    )


def test_a_span_needs_only_its_own_shards(models_dir: Path, tmp_path: Path) -> None:
    reference(save_tiny_model("qwen3", models_dir)).save_pretrained(
        tmp_path / "m", max_shard_size="200KB"
    )
    checkpoint = open_local(tmp_path / "m")
    needed = {info.file for name, info in checkpoint.stored.items() if "layers.4." in name}
    for file in (tmp_path / "m").glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    assert load_blocks(checkpoint, Span(4, 5), **CPU).weight_bytes > 0  # type: ignore[arg-type]


def weight_of(head: Head) -> torch.Tensor:
    assert isinstance(head._lm_head, nn.Linear)
    return head._lm_head.weight


def test_tied_ends_share_their_weight(models_dir: Path) -> None:
    embedder, head = load_embedder_and_head(
        open_local(save_tiny_model("llama_tied", models_dir)),
        **CPU,  # type: ignore[arg-type]
    )
    assert weight_of(head).data_ptr() == next(embedder.token_embedding.parameters()).data_ptr()


def test_a_tied_weight_saved_twice_is_shared(models_dir: Path, tmp_path: Path) -> None:
    folder = rewritten(
        save_tiny_model("llama_tied", models_dir),
        tmp_path / "twice",
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    )
    embedder, head = load_embedder_and_head(open_local(folder), **CPU)  # type: ignore[arg-type]
    assert weight_of(head).data_ptr() == next(embedder.token_embedding.parameters()).data_ptr()


def test_a_tied_weight_saved_as_the_head_serves_both_ends(models_dir: Path, tmp_path: Path) -> None:
    def only_head(tensors: Tensors) -> Tensors:
        weight = tensors.pop("model.embed_tokens.weight")
        return {**tensors, "lm_head.weight": weight}

    folder = save_tiny_model("llama_tied", models_dir)
    changed = rewritten(folder, tmp_path / "head", only_head)
    assert torch.equal(Run(Chain(changed)).step(PROMPT), Run(Chain(folder)).step(PROMPT))


def test_tied_by_config_but_different_on_disk_is_not_tied(models_dir: Path, tmp_path: Path) -> None:
    """As transformers does, which takes the config to be wrong then."""
    folder = rewritten(
        save_tiny_model("llama_tied", models_dir),
        tmp_path / "different",
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)},
    )
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([PROMPT])).logits[0]
    assert distance(Run(Chain(folder)).step(PROMPT), expected) <= 1e-5


def test_missing_tensors_are_named(models_dir: Path, tmp_path: Path) -> None:
    missing = "model.layers.3.mlp.down_proj.weight"

    def lacking(tensors: Tensors) -> Tensors:
        del tensors[missing]
        return tensors

    checkpoint = open_local(
        rewritten(save_tiny_model("llama", models_dir), tmp_path / "m", lacking)
    )
    with pytest.raises(CorruptCheckpointError, match=missing):
        load_blocks(checkpoint, Span(2, 4), **CPU)  # type: ignore[arg-type]
    load_blocks(checkpoint, Span(0, 3), **CPU)  # type: ignore[arg-type]


def test_an_untied_head_that_is_missing_is_named(models_dir: Path, tmp_path: Path) -> None:
    folder = rewritten(save_tiny_model("llama_tied", models_dir), tmp_path / "m")
    set_config(folder, tie_word_embeddings=False)
    with pytest.raises(CorruptCheckpointError, match=r"lm_head\.weight"):
        load_embedder_and_head(open_local(folder), **CPU)  # type: ignore[arg-type]


def test_a_tensor_of_another_shape_is_named(models_dir: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = rewritten(
        save_tiny_model("llama", models_dir),
        tmp_path / "m",
        lambda tensors: {**tensors, name: tensors[name][:32]},
    )
    with pytest.raises(CorruptCheckpointError, match=r"q_proj\.weight has shape \[32, 64\]"):
        load_blocks(open_local(folder), Span(0, 2), **CPU)  # type: ignore[arg-type]
