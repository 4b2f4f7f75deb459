"""Small random models of every served family, for tests of any layer.

A random model as initialized repeats one token for ever and hardly looks at positions. These have
their weights scaled until greedy decoding varies, so that a wrong block or position shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from tests.engine.model_types import tiny_config

_AUTO: Any = AutoModelForCausalLM
_LOGGING: Any = transformers_logging

HIDDEN = 64
HEADS = 4
HEAD_DIM = 32
"""Of Llama and Mistral: these have machine code (`engine/model/fused_decoder.py`), heads of 16 have
not."""
BLOCKS = 6
POSITIONS = 1024
VOCABULARY = 320
WINDOW = 64
NEW_TOKENS = 48
LEAST_DISTINCT = 16

SLIDING, FULL = "sliding_attention", "full_attention"
# Uneven on purpose: spans of two see other mixes, so that a span with its neighbour's types fails.
LAYER_TYPES = [SLIDING, SLIDING, FULL, SLIDING, FULL, FULL]

_NO_SPECIAL_TOKENS: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_COMMON: dict[str, Any] = {
    **_NO_SPECIAL_TOKENS,
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
_LLAMA: dict[str, Any] = {**_COMMON, "intermediate_size": 96, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": LAYER_TYPES,
    "query_pre_attn_scalar": 32,
}
_QWEN: dict[str, Any] = {
    **_LLAMA,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 3,
}
_FALCON: dict[str, Any] = {**_COMMON, "ffn_hidden_size": 128}
_BLOOM: dict[str, Any] = {
    **_NO_SPECIAL_TOKENS,
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "n_layer": BLOCKS,
    "n_head": HEADS,
    "seq_length": POSITIONS,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_LLAMA, head_dim=HEAD_DIM),
    "mistral": lambda: MistralConfig(**_LLAMA, head_dim=HEAD_DIM, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_QWEN),
    "qwen3": lambda: Qwen3Config(**_QWEN, head_dim=32),
    "gemma2": lambda: Gemma2Config(
        **_GEMMA, final_logit_softcapping=30.0, attn_logit_softcapping=50.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
    "phi3": lambda: Phi3Config(**_LLAMA, sliding_window=WINDOW),
    "gpt2": lambda: GPT2Config(
        **_NO_SPECIAL_TOKENS,
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=BLOCKS,
        n_head=HEADS,
        n_positions=POSITIONS,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON, intermediate_size=128),
    "bloom": lambda: BloomConfig(**_BLOOM),
    "falcon": lambda: FalconConfig(**_FALCON, multi_query=True),
    "falcon_new": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_alibi": lambda: FalconConfig(
        **_FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "opt": lambda: OPTConfig(**_COMMON, ffn_dim=128, word_embed_proj_dim=HIDDEN),
    "mixtral": lambda: MixtralConfig(
        **_LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
}
"""A config of each family of `nesa_node.engine.weights.families`, Falcon in its three
architectures."""

VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama_biased": lambda: LlamaConfig(**_LLAMA, head_dim=32, attention_bias=True, mlp_bias=True),
    "llama_tied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "llama3_rope": lambda: LlamaConfig(
        **_LLAMA,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt_neox_serial": lambda: GPTNeoXConfig(
        **_COMMON, intermediate_size=128, use_parallel_residual=False, tie_word_embeddings=True
    ),
    "bloom_post_norm": lambda: BloomConfig(**_BLOOM, apply_residual_connection_post_layernorm=True),
    "opt_projected": lambda: OPTConfig(
        **_COMMON, ffn_dim=128, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
}
"""Other shapes of those families; the engine's own tests run them."""

_FIRST_ATTEMPT = {"gemma3": 4, "bloom_post_norm": 2}
"""The seeds before repeat themselves at every scale, which takes seconds to find out."""


def prompt_ids(length: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def save_tiny_model(family: str, folder: Path, *, seed: int = 0, num_blocks: int = BLOCKS) -> Path:
    """Save a model with safetensors under `folder` and return its own folder.

    `family` is one of `FAMILIES` or `VARIANTS`, or a model type of transformers.
    One that is there already is used again: give a session-scoped `folder` to make each once.
    """
    target = folder / f"{family}-{num_blocks}-{seed}"
    if target.is_dir():
        return target
    model = _varied_model(family, seed=seed, num_blocks=num_blocks)
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with _no_progress_bars():
        model.save_pretrained(partial)
    return partial.rename(target)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a whole model the way transformers does."""
    with _no_progress_bars():
        return _AUTO.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Decode with transformers' own `generate`."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


def _varied_model(family: str, *, seed: int, num_blocks: int) -> Any:
    make = {**FAMILIES, **VARIANTS}.get(family)
    config: Any = tiny_config(family) if make is None else make()
    config.num_hidden_layers = num_blocks
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [
            config.layer_types[index % len(config.layer_types)] for index in range(num_blocks)
        ]
    for attempt in range(_FIRST_ATTEMPT.get(family, 0), 12):
        model = _random_model(config, seed=seed + 1000 * attempt)
        # The same embeddings, or a model with tied ones repeats the token that it has read.
        kept = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        scaled = [p for p in model.parameters() if p.ndim > 1 and id(p) not in kept]
        for parameter in scaled:
            # Activations such as ReLU have a mean; passed on, it drowns what tells tokens apart.
            parameter.data -= parameter.data.mean(-1, keepdim=True)
            parameter.data -= parameter.data.mean(-2, keepdim=True)
        _scale(scaled, 4.0)
        for _ in range(7):
            if _varies(model) and _is_well_conditioned(model):
                return model
            _scale(scaled, 1.4)
    raise AssertionError(f"{family} repeats itself whatever the scale of its weights")


def _random_model(config: Any, *, seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = _AUTO.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Norms and biases start as exact ones and zeros, where a mistake could hide.
                noise = 0.02 if name.endswith("bias") else 0.1
                parameter.data += noise * torch.randn_like(parameter)
            if name.endswith("wpe.weight") or "embed_positions" in name:
                parameter.data *= 5.0
    return model.eval()


def _scale(parameters: list[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        parameter.data *= factor


def _varies(model: Any) -> bool:
    counts = (len(set(greedy(model, prompt_ids(length), NEW_TOKENS))) for length in (12, 700))
    return all(count >= LEAST_DISTINCT for count in counts)


@torch.inference_mode()
def _is_well_conditioned(model: Any) -> bool:
    """Return whether transformers agrees with itself on one forward and on token by token.

    Scaled too far, a random model is chaotic: it blows up the last bits in which both differ.
    """
    ids = torch.tensor([prompt_ids(400)])
    expected = model(ids).logits[0, -40:]
    output = model(ids[:, :-40], use_cache=True)
    logits = []
    for column in range(360, 400):
        output = model(ids[:, column : column + 1], past_key_values=output.past_key_values)
        logits.append(output.logits[0])
    error = (torch.cat(logits) - expected).abs().max() / expected.abs().max()
    return bool(error < 1e-5)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = _LOGGING.is_progress_bar_enabled()
    _LOGGING.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            _LOGGING.enable_progress_bar()
