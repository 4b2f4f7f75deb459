"""Small GGUF files of random models of transformers, as llama.cpp's converter would write them.

Written after `convert_hf_to_gguf.py` with the package `gguf`, independently of the reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Kind = gguf.GGMLQuantizationType
F32, F16, BF16, Q8_0 = Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0
Array = np.ndarray[Any, Any]
_AUTO: Any = AutoModelForCausalLM

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "gpt_oss": "gpt-oss",
    "gpt2": "gpt2",
    "bloom": "bloom",
    "falcon": "falcon",
}


def make_random_model(config: Any, *, seed: int = 0) -> PreTrainedModel:
    """A model whose tensors are all random, biases and norms too, so that none can be left out."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = _AUTO.from_config(config, dtype=torch.float32).eval()
        ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.data += 0.1 * noise
            elif "bias" in name:
                parameter.data = 0.1 * noise
            elif id(parameter) in ends:
                parameter.data = 0.5 * noise
            else:
                parameter.data = 0.1 * noise
    return model  # type: ignore[no-any-return]


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    kind: Kind = F32,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors: Mapping[str, Array] | None = None,
    **options: Any,
) -> Path:
    """Write a model with its matrices in `kind`; `metadata` is added, under the architecture."""
    config: Any = model.config
    name = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, name, **options)
    add_settings(writer, config)
    for key, value in (metadata or {}).items():
        _add_value(writer, f"{name}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    for tensor_name, values in (convert(model) | dict(tensors or {})).items():
        _add_tensor(writer, tensor_name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: Array, kind: Kind) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if values.ndim == 1 or kind == F32 or values.shape[-1] % block:
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def quantize(values: Array, kind: Kind) -> Array:
    """Values in blocks; of kinds that the package cannot make, valid random bytes."""
    try:
        return gguf.quants.quantize(values.astype(np.float32), kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind, scale=0.02, seed=values.size)


_SCALES = {
    Kind.Q4_1: (0, 2),
    Kind.Q5_1: (0, 2),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
}
"""Where blocks have float16 scales: at their beginning, but for these."""


def random_blocks(shape: tuple[int, ...], kind: Kind, *, scale: float, seed: int = 0) -> Array:
    """Random bytes of blocks, with scales that are `scale`."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    half = np.frombuffer(np.float16(scale / 16).tobytes(), np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = 120  # 2 to the power of -7
    elif kind == Kind.NVFP4:
        raw[..., :4] = 0x28
    elif kind == Kind.IQ1_M:
        # The scale's four hexadecimal digits are the highest of four numbers.
        digits = int.from_bytes(np.float16(scale).tobytes(), "little")
        for index in range(4):
            high = raw[..., 48 + 2 * index + 1]
            raw[..., 48 + 2 * index + 1] = (high & 0x0F) | ((digits >> 4 * index & 15) << 4)
    else:
        for offset in _SCALES.get(kind, (0,)):
            raw[..., offset : offset + 2] = half
    return raw.reshape(*shape[:-1], -1)


def add_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    """Metadata that llama.cpp's converter writes for each architecture."""
    kind = config.model_type
    heads = config.num_attention_heads
    width = config.hidden_size
    writer.add_context_length(
        config.seq_length if kind == "bloom" else config.max_position_embeddings
    )
    writer.add_embedding_length(width)
    writer.add_block_count(config.num_hidden_layers)
    inner = {
        "bloom": 4 * width,
        "gpt2": getattr(config, "n_inner", None) or 4 * width,
        "falcon": getattr(config, "ffn_hidden_size", None),
    }
    writer.add_feed_forward_length(inner.get(kind) or config.intermediate_size)
    writer.add_head_count(heads)
    if kind == "falcon":
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    elif kind not in ("gpt2", "bloom"):
        writer.add_head_count_kv(config.num_key_value_heads)
    for name in (
        "rms_norm_eps",
        "layer_norm_eps",
        "norm_epsilon",
        "norm_eps",
        "layer_norm_epsilon",
    ):
        if hasattr(config, name):
            add = writer.add_layer_norm_rms_eps if "rms" in name else writer.add_layer_norm_eps
            add(getattr(config, name))
    _add_rope(writer, config)
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None)
    if config.model_type in ("gpt2", "bloom") or not rope:
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = getattr(config, "head_dim", None) is not None and config.model_type != "falcon"
    if own:
        writer.add_key_length(head)
        writer.add_value_length(head)
    whole = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head * whole.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(whole["rope_type"]))
        writer.add_rope_scaling_factor(whole["factor"])
    if whole["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
    if whole["rope_type"] == "longrope":
        original = whole["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_int64,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def convert(model: PreTrainedModel) -> dict[str, Array]:
    """The model's tensors by their names in GGUF, changed as llama.cpp's converter does."""
    config: Any = model.config
    kind = config.model_type
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, Array] = {}
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    for name, value in model.state_dict().items():
        if name in tied or name.endswith((".attn.bias", ".masked_bias")):
            continue
        tensor: Tensor = value.float()
        if ".experts." in name:
            found |= _convert_experts(name, tensor, kind)
            continue
        if name.endswith(".sinks"):
            name += ".weight"
        given = name.removeprefix("transformer.") if kind == "bloom" else name
        gguf_name = names.get_name(given, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        found[gguf_name] = _change(gguf_name, tensor, config).contiguous().numpy()
    found |= _rope_tensors(config)
    return found


def _convert_experts(name: str, tensor: Tensor, kind: str) -> dict[str, Array]:
    block = re.search(r"layers\.(\d+)\.", name)
    assert block is not None
    suffix = "bias" if name.endswith("bias") else "weight"
    prefix = f"blk.{block[1]}.ffn"
    if kind == "gpt_oss" and suffix == "weight":
        tensor = tensor.transpose(1, 2)
    if "down_proj" in name:
        return {f"{prefix}_down_exps.{suffix}": tensor.contiguous().numpy()}
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if kind == "gpt_oss" else tensor.chunk(2, dim=1)
    return {
        f"{prefix}_gate_exps.{suffix}": gate.contiguous().numpy(),
        f"{prefix}_up_exps.{suffix}": up.contiguous().numpy(),
    }


def _change(name: str, tensor: Tensor, config: Any) -> Tensor:
    kind = config.model_type
    heads = config.num_attention_heads
    if kind in ("llama", "mistral", "mixtral") and re.search(r"attn_[qk]\.", name):
        own = heads if "attn_q" in name else config.num_key_value_heads
        halves = tensor.reshape(own, 2, tensor.shape[0] // own // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind in ("gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        return tensor + 1
    if kind == "bloom" and "attn_qkv" in name:
        sides = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
        return torch.cat([sides[:, side].reshape(-1, *tensor.shape[1:]) for side in range(3)])
    if kind == "falcon" and "attn_qkv" in name:
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
        qkv = tensor.reshape(groups, heads // groups + 2, -1, *tensor.shape[1:])
        parts = (qkv[:, :-2], qkv[:, [-2]], qkv[:, [-1]])
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    if kind == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name):
        return tensor.T
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return tensor.reshape(-1)
    return tensor


def _rope_tensors(config: Any) -> dict[str, Array]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{side}.weight": np.array(rope[f"{side}_factor"], np.float32)
            for side in ("short", "long")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size, theta = config.head_dim, rope["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}


def add_byte_tokenizer(writer: gguf.GGUFWriter, vocab_size: int = 320) -> None:
    """Byte-level BPE of 256 bytes, some merges, and two special tokens; the rest is unused."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelled: Any = bytes_to_unicode
    tokens = list(spelled().values())
    merges = ["t h", "th e", "\u0120 a", "i n", "e r", "\u0120 the"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [1] * len(tokens)
    tokens += ["<|start|>", "<|end|>", "<think>"]
    types += [3, 3, 4]
    ends = len(tokens) - 2
    tokens += [f"[PAD{index}]" for index in range(vocab_size - len(tokens))]
    types += [5] * (vocab_size - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ends - 1)
    writer.add_eos_token_id(ends)
    writer.add_pad_token_id(0)
    writer.add_chat_template(
        "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    )


def add_piece_tokenizer(writer: gguf.GGUFWriter, vocab_size: int = 320) -> None:
    """SentencePiece's BPE with bytes as a fallback."""
    pieces = ["\u2581", "t", "h", "e", "a", "i", "n", "th", "the", "\u2581the", "in", "\u2581a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *([6] * 256), *([1] * len(pieces))]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    spare = vocab_size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(spare)])
    writer.add_token_types(types + [5] * spare)
    writer.add_token_scores(scores + [-1000.0] * spare)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
