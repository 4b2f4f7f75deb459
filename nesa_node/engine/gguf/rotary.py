"""Rotary frequencies of a GGUF file's model, as transformers' configs state them."""

from __future__ import annotations

import math
from typing import Any

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.gguf.fields import MetadataFields
from nesa_node.engine.gguf.tensors import LLAMA3_TENSOR, LONGROPE_TENSORS, read_vector

MAX_FREQUENCIES = 4096
"""Of a head: half its size."""
_DEFAULT_BASE = 10_000.0
"""llama.cpp's, where a file states none."""
_LLAMA3_CONTEXT = 8192
"""Tokens with which Llama 3 was trained before its frequencies were scaled: files hold what that
made of the frequencies, not the setting."""
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def read_rope(fields: MetadataFields, model_type: str, head_dim: int) -> dict[str, Any]:
    """Return the config's `rope_parameters`.

    Raises `UnsupportedModelError` for a scaling that transformers' model does not have, and
    `CorruptCheckpointError`.
    """
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": fields.positive("rope.freq_base") or _DEFAULT_BASE,
    }
    rotated = fields.optional_size("rope.dimension_count") or head_dim
    if fields.architecture.partial_rotary:
        if rotated > head_dim:
            raise fields.mistake("rope.dimension_count", rotated)
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise UnsupportedModelError(
            f"{fields.header.name} rotates {rotated} of {head_dim} numbers of a head, which "
            f"transformers' {model_type} does not"
        )
    rope |= _read_scaling(fields, model_type)
    if fields.has_tensor(LLAMA3_TENSOR):
        rope |= _read_llama3(fields, rope["rope_theta"], rotated)
    if model_type != "gemma3_text":
        return rope
    local = fields.positive("rope.freq_base_swa") or _DEFAULT_BASE
    return {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _read_scaling(fields: MetadataFields, model_type: str) -> dict[str, Any]:
    if model_type == "phi3" and fields.has_tensor(LONGROPE_TENSORS[0]):
        return _read_longrope(fields)
    kind = fields.value("rope.scaling.type")
    factor = fields.positive("rope.scaling.factor") or fields.positive("rope.scale_linear")
    if kind is None and factor not in (None, 1.0):
        kind = "linear"
    match kind:
        case None | "none":
            return {}
        case "linear" if factor is not None:
            return {"rope_type": "linear", "factor": factor}
        case "yarn" if factor is not None:
            found = _read_yarn(fields, factor)
            # As its config, and llama.cpp's computation, have it.
            return found | {"truncate": False} if model_type == "gpt_oss" else found
    raise fields.refusal(f"scales its rotary frequencies by {kind!r:.40}")


def _read_yarn(fields: MetadataFields, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
    }
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := fields.positive(f"rope.scaling.{key}")) is not None:
            found[name] = value
    for key in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor"):
        if fields.number(f"rope.scaling.{key}") not in (None, 1.0):
            raise fields.refusal(f"states rope.scaling.{key}")
    return found


def _read_longrope(fields: MetadataFields) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
    }
    if (scale := fields.positive("rope.scaling.attn_factor")) is not None:
        found["attention_factor"] = scale
    for side, name in zip(("short", "long"), LONGROPE_TENSORS, strict=True):
        found[f"{side}_factor"] = read_vector(fields.tensor(name, 1), MAX_FREQUENCIES)
    return found


def _read_llama3(fields: MetadataFields, theta: float, rotated: int) -> dict[str, Any]:
    """Llama 3's scaling, of which files hold what it divided each frequency by."""
    divisors = read_vector(fields.tensor(LLAMA3_TENSOR, 1), MAX_FREQUENCIES)
    if all(value == 1.0 for value in divisors):
        return {}
    factor = max(divisors)
    is_whole = factor > 0 and 2 * len(divisors) == rotated
    made = _llama3_divisors(theta, rotated, factor) if is_whole else []
    if is_whole and all(
        math.isclose(*pair, rel_tol=1e-4) for pair in zip(made, divisors, strict=True)
    ):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    raise fields.refusal(f"has a {LLAMA3_TENSOR} that is no scaling of Llama 3's")


def _llama3_divisors(theta: float, rotated: int, factor: float) -> list[float]:
    """What transformers' `llama3` divides each frequency by (llama.cpp's converter alike)."""
    divisors = []
    for index in range(0, rotated, 2):
        turns = _LLAMA3_CONTEXT / (2 * math.pi * theta ** (index / rotated))
        smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
