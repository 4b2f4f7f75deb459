"""Architectures of GGUF files that can be served, and how llama.cpp's converter changed each.

Facts of llama.cpp's converter (convert_hf_to_gguf.py) and of transformers' configs; tests compare
them with transformers' own loader of GGUF, and with models that were converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which stored tensors have rows in another order, and where each row belongs."""

    kinds: tuple[str, ...]
    find: Callable[[int, int, int], Tensor | None]
    """Of the number of rows, of heads and of groups of heads: the target [R] of each stored row;
    None where the rows are not so many heads."""


def _rotary_pairs(rows: int, heads: int, _groups: int) -> Tensor | None:
    """Llama: numbers that are rotated together lie together, not half a head apart."""
    if rows % (2 * heads):
        return None
    half = rows // heads // 2
    stored_H2D = torch.arange(rows).view(heads, 2, half)
    return stored_H2D.transpose(1, 2).reshape(-1)


def _thirds(rows: int, heads: int, _groups: int) -> Tensor | None:
    """BLOOM: queries, keys and values of all heads, not of each."""
    if rows % (3 * heads):
        return None
    return torch.arange(rows).view(heads, 3, -1).transpose(0, 1).reshape(-1)


def _grouped_thirds(rows: int, heads: int, groups: int) -> Tensor | None:
    """Falcon: queries, keys and values of all groups, not of each."""
    per_group = heads // groups + 2
    if heads % groups or rows % (groups * per_group):
        return None
    rows_GHD = torch.arange(rows).view(groups, per_group, -1)
    sides = (rows_GHD[:, :-2], rows_GHD[:, -2:-1], rows_GHD[:, -1:])
    return torch.cat([side.reshape(-1) for side in sides])


_NORMED = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_COMMON = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


def _keys(**changed: str) -> dict[str, str]:
    """The usual keys, with other names of those that a config calls otherwise."""
    return {key: changed.get(name, name) for key, name in _COMMON.items()}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What `general.architecture` says."""

    name: str
    model_type: str
    """Of transformers."""
    keys: Mapping[str, str]
    """Settings of its config, by the metadata that must state them."""
    kv_heads: str | None = "num_key_value_heads"
    """Setting for the heads of keys and values."""
    head_dim: bool = False
    """Its config states the size of heads."""
    rotates: bool = True
    partial_rotary: bool = False
    """A part of each head may be rotated."""
    row_order: RowOrder | None = None
    norm_offset: float = 0.0
    is_transposed: bool = False
    """Its matrices are those of GPT-2, whose inputs come first."""
    interleaves_gates: bool = False
    """Of each expert, gates and what these are for take turns, and inputs come first."""
    fixed: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Settings that all of its files have."""


_LLAMA_ROWS = RowOrder(("attn_q", "attn_k"), _rotary_pairs)
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    each.name: each
    for each in (
        GgufArchitecture("llama", "llama", _keys() | _NORMED, head_dim=True, row_order=_LLAMA_ROWS),
        GgufArchitecture("qwen2", "qwen2", _keys() | _NORMED),
        GgufArchitecture("qwen2moe", "qwen2_moe", _keys() | _NORMED | _EXPERTS),
        GgufArchitecture("qwen3", "qwen3", _keys() | _NORMED, head_dim=True),
        GgufArchitecture(
            "qwen3moe",
            "qwen3_moe",
            _keys() | _NORMED | _EXPERTS,
            head_dim=True,
            # llama.cpp computes them so, without a key that says it.
            fixed={"norm_topk_prob": True},
        ),
        GgufArchitecture("phi3", "phi3", _keys() | _NORMED, partial_rotary=True),
        GgufArchitecture("gemma2", "gemma2", _keys() | _NORMED, head_dim=True, norm_offset=1.0),
        GgufArchitecture(
            "gemma3", "gemma3_text", _keys() | _NORMED, head_dim=True, norm_offset=1.0
        ),
        GgufArchitecture(
            "starcoder2", "starcoder2", _keys() | {"attention.layer_norm_epsilon": "norm_epsilon"}
        ),
        GgufArchitecture(
            "stablelm",
            "stablelm",
            _keys() | {"attention.layer_norm_epsilon": "layer_norm_eps"},
            partial_rotary=True,
        ),
        GgufArchitecture(
            "nemotron",
            "nemotron",
            _keys() | {"attention.layer_norm_epsilon": "norm_eps"},
            head_dim=True,
            partial_rotary=True,
            norm_offset=1.0,
        ),
        GgufArchitecture(
            "gpt-oss",
            "gpt_oss",
            {key: name for key, name in _keys().items() if key != "feed_forward_length"}
            | _NORMED
            | {
                "expert_feed_forward_length": "intermediate_size",
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
                "attention.sliding_window": "sliding_window",
            },
            head_dim=True,
            interleaves_gates=True,
        ),
        GgufArchitecture(
            "gpt2",
            "gpt2",
            _keys(
                num_hidden_layers="n_layer",
                hidden_size="n_embd",
                intermediate_size="n_inner",
                num_attention_heads="n_head",
                max_position_embeddings="n_positions",
            )
            | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
            kv_heads=None,
            rotates=False,
            is_transposed=True,
        ),
        GgufArchitecture(
            "bloom",
            "bloom",
            _keys(
                num_hidden_layers="n_layer",
                num_attention_heads="n_head",
                max_position_embeddings="seq_length",
            )
            | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
            kv_heads=None,
            rotates=False,
            row_order=RowOrder(("attn_qkv",), _thirds),
        ),
        GgufArchitecture(
            "falcon",
            "falcon",
            _keys(intermediate_size="ffn_hidden_size")
            | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
            kv_heads="num_kv_heads",
            row_order=RowOrder(("attn_qkv",), _grouped_thirds),
            fixed={"alibi": False, "bias": False, "parallel_attn": True},
        ),
    )
}
