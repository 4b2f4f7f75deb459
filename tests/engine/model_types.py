"""Small configs of every causal model type that transformers knows."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from nesa_node.engine.weights import families

CAUSAL_TYPES = sorted(families.CAUSAL_TYPES)

HIDDEN, BLOCKS, HEADS, WINDOW, POSITIONS, VOCABULARY = 64, 6, 4, 64, 1024, 320
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96
    ),
    **dict.fromkeys(("ffn_hidden_size", "dff"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), BLOCKS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), BLOCKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_heads",), HEADS),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_head", "d_kv"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), POSITIONS),
    "vocab_size": VOCABULARY,
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "local_attention", "window_size"), WINDOW
    ),
    "use_sliding_window": True,
    "rotary_dim": 8,
    "layer_types": None,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id"), None),
    **dict.fromkeys(("attention_dropout", "dropout", "dropout_rate"), 0.0),
    "num_mtp_layers": 0,
    "index_topk": 32,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "layerdrop": 0.0,
}
"""By the names that configs use."""
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_GRANITE = {"embedding_multiplier": 6.0, "logits_scaling": 8.0, "residual_multiplier": 0.5}
_PER_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa"), _GRANITE),
    "granitemoeshared": _GRANITE,
    "cwm": {"bos_token_id": 1, "eos_token_id": [2]},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "modernbert-decoder": {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [96] * BLOCKS,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": ["attention"] * BLOCKS} | _GRANITE,
    "gemma4_unified_text": {"global_head_dim": 32},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 3, "num_mem_blocks": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
}
"""What a type needs besides."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a config with few small layers. Raises what transformers does for one it refuses."""
    kind: Any = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in _SIZES.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        given["num_key_value_heads"] = HEADS
    config: PreTrainedConfig = kind(**given | _PER_TYPE.get(model_type, {}))
    return config
