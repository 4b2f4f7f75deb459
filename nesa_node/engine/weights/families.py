"""What the engine has to know of a model family: where it keeps its layers, embedding and head.

A family's decoder runs a span with its own forward: masks, rotary tables and ALiBi stay
transformers'. Families differ in the names of the layers and of the modules before and after them,
which a span does without. The table has those that something was written for; of other models of
transformers, `model_tree.py` reads it from the module tree.

Reader of a model's config that never runs the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.cache.cache_side import count_head_bytes
from nesa_node.engine.weights.files import read_json
from nesa_node.engine.weights.formats.quantization_config import find_format
from nesa_node.engine.weights.pipeline_folder import is_pipeline, read_pipeline_index


@dataclass(frozen=True, slots=True)
class CacheHeads:
    """Shape of the KV cache per token and layer: a key and a value of `num_kv_heads * head_dim`.

    `repeats` > 1: the model repeats every head that many times in a row; one copy is stored.
    `values`: heads and size of the values where they have a shape of their own, as in multi-head
    latent attention, which caches a latent vector as key and the rotated part of all keys as value.
    """

    num_kv_heads: int
    head_dim: int
    repeats: int = 1
    values: tuple[int, int] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their size, of a token's key and of its value."""
        keys = (self.num_kv_heads, self.head_dim)
        return keys, self.values or keys

    def bytes_per_token(self, dtype: torch.dtype, cache_dtype: CacheDtype = "auto") -> int:
        """Return 2 x head_dim x n_kv_heads x bytes per item: the cache of a token in one block.

        In int8 with a scale for each head. Nesa paper, eq. 4, corrected: the paper counts query
        heads and the whole model's blocks.
        """
        return sum(heads * count_head_bytes(dim, dtype, cache_dtype) for heads, dim in self.shapes)


def _grouped_query_heads(config: Any) -> CacheHeads:
    heads = config.num_attention_heads
    count = getattr(config, "num_key_value_heads", None) or heads
    return CacheHeads(count, getattr(config, "head_dim", None) or config.hidden_size // heads)


def _falcon_heads(config: Any) -> CacheHeads:
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.new_decoder_architecture:
        return CacheHeads(config.num_kv_heads, dim, repeats=heads // config.num_kv_heads)
    return CacheHeads(1 if config.multi_query else config.num_kv_heads, dim)


@dataclass(frozen=True, slots=True)
class ModelTree:
    """What `model_tree.py` read from a model, whose ends run as transformers wrote them.

    Such a model's client runs the causal LM without its layers, and a node the decoder with what
    comes before and after the layers left out (`splice.py`).
    """

    cache_heads: tuple[CacheHeads, ...]
    """Of each block."""
    output_length: int
    """Of the tuple that a layer returns; 0 if it returns the hidden states themselves."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Module names: `decoder` is a path in the causal LM, the rest are the decoder's attributes.

    In order of use: `embedding`, `projection_in`, `positions` (added) and `embedding_norm` before
    the blocks; `final_modules`, in order, and the causal LM's `lm_head` after them.
    """

    title: str
    decoder: str = "model"
    layers_name: str = "layers"
    embedding: str = "embed_tokens"
    projection_in: str | None = None
    positions: str | None = None
    embedding_norm: str | None = None
    final_modules: tuple[str, ...] = ("norm",)
    cache_heads: Callable[[Any], CacheHeads] = _grouped_query_heads
    """Shape of the cache, where that of all blocks is alike."""
    head: str = "lm_head"
    """Path of the head in the causal LM."""
    tree: ModelTree | None = None
    """What was read from the module tree; None for a family of the table."""
    router: str | None = None
    """Of a mixture of experts: the module in a layer whose first output is each token's logits of
    all experts, of which it takes `num_experts_per_tok`."""
    reads_router: bool = True
    """Those with the largest logits are the experts that it takes."""
    packs_rows: bool = True
    """Attention uses transformers' interface, so rows can be packed; else rows run one by one."""
    separates_texts: bool = True
    """The decoder's own mask keeps texts apart whose positions begin again in one sequence."""
    has_llama_layers: bool = False
    """Layers are Llama-shaped, so that `FusedDecoder` can replace the decoder."""
    default_context_length: int | None = None
    """Context length where the config of the family need not state one."""
    unsupported_settings: Mapping[str, object] | None = None
    """Config settings with which a model of the family is rejected."""

    @property
    def input_modules(self) -> list[str]:
        names = (self.embedding, self.projection_in, self.positions, self.embedding_norm)
        return [name for name in names if name is not None]

    @property
    def layers_path(self) -> str:
        return f"{self.decoder}.{self.layers_name}"

    def list_cache_heads(self, config: Any) -> tuple[CacheHeads, ...]:
        """Return the shape of the cache in each of the model's blocks."""
        if self.tree is not None:
            return self.tree.cache_heads
        return (self.cache_heads(config),) * int(config.num_hidden_layers)


MAX_CONTEXT_LENGTH = 2**31 - 1
_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "seq_length", "max_seq_len")
FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily("Llama", has_llama_layers=True),
    "mistral": ModelFamily("Mistral", has_llama_layers=True),
    "mixtral": ModelFamily("Mixtral", router="mlp.gate"),
    "qwen2": ModelFamily("Qwen2", has_llama_layers=True),
    "qwen3": ModelFamily("Qwen3", has_llama_layers=True),
    "gemma2": ModelFamily("Gemma 2", unsupported_settings={"use_bidirectional_attention": True}),
    "gemma3_text": ModelFamily(
        "Gemma 3 (text)", unsupported_settings={"use_bidirectional_attention": True}
    ),
    "phi3": ModelFamily("Phi-3"),
    "gpt2": ModelFamily(
        "GPT-2",
        decoder="transformer",
        layers_name="h",
        embedding="wte",
        positions="wpe",
        final_modules=("ln_f",),
        unsupported_settings={"add_cross_attention": True},
    ),
    "gpt_neox": ModelFamily(
        "GPT-NeoX", decoder="gpt_neox", embedding="embed_in", final_modules=("final_layer_norm",)
    ),
    "bloom": ModelFamily(
        "BLOOM",
        decoder="transformer",
        layers_name="h",
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        final_modules=("ln_f",),
        packs_rows=False,
        separates_texts=False,
        default_context_length=2048,
    ),
    "falcon": ModelFamily(
        "Falcon",
        decoder="transformer",
        layers_name="h",
        embedding="word_embeddings",
        final_modules=("ln_f",),
        cache_heads=_falcon_heads,
        packs_rows=False,
        separates_texts=False,
    ),
    "opt": ModelFamily(
        "OPT",
        decoder="model.decoder",
        projection_in="project_in",
        positions="embed_positions",
        final_modules=("final_layer_norm", "project_out"),
        separates_texts=False,
    ),
}


def format_family_titles() -> str:
    named = ", ".join(family.title for family in FAMILIES.values())
    return f"{named}, and other stacks of decoder layers, which docs/models.md lists"


CAUSAL_TYPES = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Those of transformers, before anything is registered beside them, such as clients' models."""


def is_known_type(model_type: object) -> bool:
    """Whether transformers has a causal LM of this type. Its config may still be refused."""
    known = isinstance(model_type, str)
    return known and (model_type in FAMILIES or model_type in CAUSAL_TYPES)


def require_known_type(model_type: object, *, name: str) -> None:
    """Raises `UnsupportedModelError` for a type of which transformers has no causal LM."""
    if not is_known_type(model_type):
        raise UnsupportedModelError(
            f"{name} is a {model_type or 'model of unknown type'}, which cannot be served. "
            f"These families can: {format_family_titles()}"
        )


def require_servable(config: Any, *, name: str) -> None:
    """Raises `UnsupportedModelError` for a model of a family that is no causal decoder."""
    family = FAMILIES.get(config.model_type)
    for key, value in ((family and family.unsupported_settings) or {}).items():
        if getattr(config, key, None) == value:
            raise UnsupportedModelError(f"{name} sets {key}={value!r}, which cannot be served")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder, which cannot be served")


def get_context_length(family: ModelFamily, config: Any) -> int:
    """Return the maximum number of tokens of one sequence.

    With rotary scaling of type `longrope` or `dynamic` the frequencies change once a sequence
    outgrows the original length, and keys cached before no longer fit: transformers then recomputes
    the cache, which a chain of nodes cannot. There the limit is the original length. Raises
    `UnsupportedModelError` where the config states no valid limit.
    """
    stated = (getattr(config, key, None) for key in _CONTEXT_LENGTH_KEYS)
    limits = [next(filter(None, stated), None) or family.default_context_length]
    rope = getattr(config, "rope_parameters", None) or {}
    limits += [
        parameters.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if parameters.get("rope_type") in ("longrope", "dynamic")
    ]
    known = [int(limit) for limit in limits if limit]
    if not known or not 0 < min(known) <= MAX_CONTEXT_LENGTH:
        raise UnsupportedModelError("the model's config states no valid context length")
    return min(known)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


MAX_BLOCKS = 1024
MAX_LABELS = 10_000
MAX_EXPERTS = 4096
_NUM_BLOCKS_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_SIZE_SUFFIXES = ("_size", "_dim", "_rank", "_capacity")
"""Of settings that are sizes of tensors, from which transformers builds no lists."""


def read_raw_config(folder: Path, *, name: str) -> dict[str, Any]:
    """Return the parsed `config.json`, or of a pipeline's folder all that decides what it is.

    Raises `ModelNotFoundError`, `CorruptCheckpointError` and `UnsupportedModelError`.
    """
    if is_pipeline(folder):
        index = read_pipeline_index(folder, name=name)
        parts = {part: read_raw_config(folder / part, name=name) for part in index.parts}
        return {"pipeline": index.class_name, "parts": parts}
    path = folder / "config.json"
    try:
        raw = read_json(path)
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"{name}: {path} does not exist; a model folder holds config.json and *.safetensors"
        ) from error
    if not isinstance(raw, dict):
        raise CorruptCheckpointError(f"{path} is no JSON object")
    return raw


def read_config(folder: Path, *, name: str) -> PreTrainedConfig:
    """Return the config of a supported model. Raises `UnsupportedModelError` for unsupported ones.

    Code in a checkpoint (`auto_map`) is never run: a model type unknown to transformers is
    rejected. The checkpoint cannot choose attention or expert implementations either. Also raises
    `ModelNotFoundError` and `CorruptCheckpointError`.
    """
    raw = read_raw_config(folder, name=name)
    find_format(raw, name=name)
    return _check_config(raw, folder / "config.json", lambda: parse_config(folder), name=name)


def read_config_text(text: bytes, *, name: str) -> PreTrainedConfig:
    """Return the config of a supported model from its JSON. Raises as `read_config` does."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{name}: its config is no JSON object") from error
    _require_unquantized(raw, name)

    def parse() -> PreTrainedConfig:
        kind = CONFIG_MAPPING[raw["model_type"]]
        return _parse(lambda: kind.from_dict(raw), name)

    return _check_config(raw, Path(name), parse, name=name)


def _check_config(
    raw: Mapping[str, Any], path: Path, parse: Callable[[], PreTrainedConfig], *, name: str
) -> PreTrainedConfig:
    if "model_type" not in raw and "auto_map" in raw:
        raise UnsupportedModelError(
            f"{name} needs its own Python code (auto_map), which is never run. "
            f"These families can be served: {format_family_titles()}"
        )
    require_known_type(raw.get("model_type"), name=name)
    check_counts(raw, path)
    config = parse()
    require_servable(config, name=name)
    return config


def read_network_config(folder: Path, *, name: str) -> PreTrainedConfig:
    """Return the config of any model of transformers, not only of a causal decoder.

    Of diffusers' models and pipelines, one that only names their class. Raises as `read_config`
    does.
    """
    raw = read_raw_config(folder, name=name)
    is_one = not is_pipeline(folder)
    find_format(raw, name=name)
    for part, each in {"": raw}.items() if is_one else raw["parts"].items():
        if not is_one:
            _require_unquantized(each, name)
        check_counts(each, folder / part / "config.json")
    if named := raw.get("_class_name") if is_one else raw["pipeline"]:
        return PreTrainedConfig(architectures=[str(named)])
    if "model_type" not in raw:
        raise UnsupportedModelError(f"{name}: {folder / 'config.json'} has no model_type")
    return parse_config(folder)


def _require_unquantized(raw: Mapping[str, Any], name: str) -> None:
    """Raise `UnsupportedModelError` for a config of quantized weights, whose format is not known
    of a pipeline's networks and of shards.
    """
    if raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"{name} has a part that is quantized, which cannot be served; use the original in "
            "float32, float16 or bfloat16"
        )


def parse_config(folder: Path) -> PreTrainedConfig:
    """The config of any model of transformers, which runs no code of the checkpoint's.

    Raises `CorruptCheckpointError`.
    """
    return _parse(
        lambda: AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        str(folder / "config.json"),
    )


def _parse(read: Callable[[], Any], path: str) -> PreTrainedConfig:
    try:
        config = read()
    except Exception as error:
        # transformers validates configs with exceptions of many types, some its own.
        raise CorruptCheckpointError(f"{path}: {error}") from error
    if not isinstance(config, PreTrainedConfig):
        raise CorruptCheckpointError(f"{path} is no model config")
    # With the package `kernels` installed, a hub name here would download and run machine code.
    config._attn_implementation = None
    config._experts_implementation = None
    # Weights are read as what they stand for: no quantizer of transformers' is to be chosen.
    for each in (config, *vars(config).values()):
        if isinstance(each, PreTrainedConfig):
            vars(each).pop("quantization_config", None)
    return config


def check_counts(raw: Mapping[str, object], path: Path) -> None:
    """Raises `CorruptCheckpointError` for counts from which transformers builds oversized lists.

    A config of fifty bytes may ask for a billion labels.
    """
    limits = {"num_labels": MAX_LABELS} | dict.fromkeys(_NUM_BLOCKS_KEYS, MAX_BLOCKS)
    counts = (key for key in raw if "expert" in key and not key.endswith(_SIZE_SUFFIXES))
    for key, most in (dict.fromkeys(counts, MAX_EXPERTS) | limits).items():
        value = raw.get(key)
        if isinstance(value, int | float) and not 0 <= value <= most:
            raise CorruptCheckpointError(f"{path}: {key} is {value}, which is not 0 to {most}")


def parse_dtype(text: str) -> torch.dtype | None:
    """Return the dtype named, or None for `auto`. Raises `ConfigError`."""
    if text == "auto":
        return None
    dtype = DTYPES.get(text.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {text!r}")
    return dtype
