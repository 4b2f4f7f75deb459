"""A model's config, as transformers would write it, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.gguf.architectures import GgufArchitecture
from nesa_node.engine.gguf.fields import MetadataFields
from nesa_node.engine.gguf.header import GgufHeader
from nesa_node.engine.gguf.rotary import read_rope
from nesa_node.engine.gguf.tensors import PLAIN_DTYPES
from nesa_node.engine.weights.families import MAX_BLOCKS

_BLOCKS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Gemma of 27B, whose attention alone is scaled by something else than a head's size; files do not
say so, and llama.cpp goes by the number of blocks, too."""
_PLAIN_VALUES = {
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
}
"""Metadata with any other value of which a model is computed otherwise."""


class GgufSettings(NamedTuple):
    """`config.json` and `generation_config.json` of a file."""

    architecture: GgufArchitecture
    config: dict[str, Any]
    generation: dict[str, Any]


def read_settings(header: GgufHeader) -> GgufSettings:
    """Return what transformers has to know of the model.

    Raises `UnsupportedModelError` for an architecture, or a setting of it, that is not served, and
    `CorruptCheckpointError` for metadata that lacks something, or contradicts itself.
    """
    fields = MetadataFields(header)
    architecture = fields.architecture
    for key, plain in _PLAIN_VALUES.items():
        if (found := fields.value(key)) is not None and found != plain:
            raise fields.refusal(f"states {architecture.name}.{key} = {found!r:.40}")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        **architecture.fixed,
        **_read_sizes(fields),
        "vocab_size": _count_tokens(fields),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
        "dtype": choose_dtype(header, architecture),
        **_read_layers(fields),
        **_read_experts(fields),
        **_read_attention(fields),
    }
    if architecture.rotates:
        config["rope_parameters"] = rope = read_rope(
            fields, config["model_type"], _head_dim(fields)
        )
        if rope.get("rope_type") == "longrope":
            # Phi-3 reads it here, too.
            original = rope["original_max_position_embeddings"]
            config["original_max_position_embeddings"] = original
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    tokens = _read_token_ids(fields, config["vocab_size"])
    stated = {name: value for name, value in tokens.items() if value is not None}
    return GgufSettings(architecture, config | tokens, stated)


def choose_dtype(header: GgufHeader, architecture: GgufArchitecture) -> str:
    """Name of the dtype in which the model is served by default.

    Plain numbers keep theirs. Blocks become bfloat16: it takes half of float32's memory and time,
    and rounds by at most 0.2 %, less than the blocks of fewer than eight bits did.
    """
    kinds = {tensor.kind for tensor in header.tensors.values()}
    stored = {str(PLAIN_DTYPES[kind]).removeprefix("torch.") for kind in kinds & set(PLAIN_DTYPES)}
    if not kinds <= set(PLAIN_DTYPES) or "bfloat16" in stored:
        return "bfloat16"
    if "float16" in stored:
        # Gemma's hidden states exceed float16's range.
        return "bfloat16" if architecture.name.startswith("gemma") else "float16"
    return "float32"


def _count_tokens(fields: MetadataFields) -> int:
    """Rows of the embedding, which may be more than the tokenizer's tokens."""
    rows = fields.tensor("token_embd.weight", 2).shape[0]
    tokens = fields.header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CorruptCheckpointError(
            f"{fields.header.path} has {len(tokens)} tokens, and embeddings of {rows}"
        )
    return rows


def _read_sizes(fields: MetadataFields) -> dict[str, Any]:
    """Settings of `GgufArchitecture.keys`, and the heads."""
    architecture = fields.architecture
    found: dict[str, Any] = {}
    for key, name in architecture.keys.items():
        if not name.endswith(("eps", "epsilon")):
            found[name] = fields.size(key)
        elif (value := fields.number(key)) is None or not 0 < value < 1:
            raise fields.mistake(key, value)
        else:
            found[name] = value
    if architecture.kv_heads is not None:
        stated = fields.optional_size("attention.head_count_kv")
        found[architecture.kv_heads] = stated or fields.size("attention.head_count")
    if architecture.head_dim:
        found["head_dim"] = _head_dim(fields)
    return found


def _head_dim(fields: MetadataFields) -> int:
    plain = fields.size("embedding_length") // fields.size("attention.head_count")
    if not fields.architecture.head_dim:
        return plain
    stated = fields.optional_size("attention.key_length")
    values = fields.optional_size("attention.value_length")
    if stated is not None and values not in (None, stated):
        raise UnsupportedModelError(
            f"{fields.header.name} has keys of {stated} numbers and values of {values}, which "
            "cannot be served"
        )
    if stated is None and not fields.architecture.partial_rotary:
        stated = fields.optional_size("rope.dimension_count")  # older files state only this
    return stated or plain


def _read_layers(fields: MetadataFields) -> dict[str, Any]:
    """Settings that files state by the tensors that they have."""
    has_bias = fields.has_tensor("blk.0.attn_q.bias")
    match fields.architecture.model_type:
        case "llama" | "nemotron":
            return {
                "attention_bias": has_bias,
                "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
            }
        case "qwen3" | "qwen3_moe" | "gemma2" | "gemma3_text":
            return {"attention_bias": has_bias}
        case "qwen2_moe":
            return {"qkv_bias": has_bias}
        case "starcoder2":
            return {"use_bias": has_bias}
        case "stablelm":
            is_parallel = not fields.has_tensor("blk.0.ffn_norm.weight")
            return {"use_qkv_bias": has_bias, "use_parallel_residual": is_parallel}
        case "falcon":
            groups = fields.optional_size("attention.head_count_kv") or 1
            has_two_norms = fields.has_tensor("blk.0.attn_norm_2.weight")
            is_new = groups > 1 or has_two_norms
            return {
                "new_decoder_architecture": is_new,
                "multi_query": not is_new,
                "num_ln_in_parallel_attn": 1 + has_two_norms if is_new else None,
            }
    return {}


def _read_experts(fields: MetadataFields) -> dict[str, Any]:
    """Sizes of experts, which only newer files state, and Mixtral, which is a `llama` there."""
    model_type = fields.architecture.model_type
    if model_type == "llama" and (experts := fields.optional_size("expert_count")):
        return {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": fields.size("expert_used_count"),
        }
    if model_type not in ("qwen2_moe", "qwen3_moe"):
        return {}
    experts_EIC = fields.tensor("blk.0.ffn_gate_exps.weight", 3)
    found: dict[str, Any] = {"moe_intermediate_size": experts_EIC.shape[1]}
    if model_type == "qwen2_moe":
        shared = fields.tensor("blk.0.ffn_gate_shexp.weight", 2)
        found["shared_expert_intermediate_size"] = shared.shape[0]
    if (is_normed := fields.value("expert_weights_norm")) is not None:
        found["norm_topk_prob"] = bool(is_normed)
    return found


def _read_attention(fields: MetadataFields) -> dict[str, Any]:
    """Windows and scales of attention."""
    found: dict[str, Any] = {}
    model_type = fields.architecture.model_type
    window = fields.optional_size("attention.sliding_window")
    if model_type in ("gemma2", "gemma3_text", "phi3") and window is not None:
        found["sliding_window"] = window
    if model_type == "gemma3_text":
        found |= _read_layer_types(fields)
    if model_type == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := fields.positive(key)) is not None:
                found[key] = cap
    if model_type in _BLOCKS_OF_27B:
        is_27b = fields.size("block_count") == _BLOCKS_OF_27B[model_type]
        per_head = fields.size("embedding_length") // fields.size("attention.head_count")
        found["query_pre_attn_scalar"] = per_head if is_27b else _head_dim(fields)
    return found


def _read_layer_types(fields: MetadataFields) -> dict[str, Any]:
    """Which blocks of Gemma 3 have a window: all but each nth, or as listed."""
    pattern = fields.listed("attention.sliding_window_pattern")
    blocks = fields.size("block_count")
    if type(pattern) is int and pattern > 0:
        slides = [(index + 1) % pattern != 0 for index in range(min(blocks, MAX_BLOCKS))]
    elif isinstance(pattern, list) and len(pattern) == blocks:
        slides = [bool(value) for value in pattern]
    else:
        return {}
    names = ("full_attention", "sliding_attention")
    return {"layer_types": [names[slide] for slide in slides]}


def _read_token_ids(fields: MetadataFields, vocab_size: int) -> dict[str, Any]:
    """Ids of special tokens; of those that end an answer, all that the file names."""
    ids = {
        name: fields.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "padding")
    }
    for name, found in ids.items():
        if found is not None and (type(found) is not int or not 0 <= found < vocab_size):
            raise CorruptCheckpointError(
                f"{fields.header.path}: tokenizer.ggml.{name}_token_id is {found!r:.40}, which "
                f"is not one of {vocab_size} tokens"
            )
    named = (ids[name] for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(found for found in named if found is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": ids["padding"],
    }
