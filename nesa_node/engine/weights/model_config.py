"""Reader of a model's config that never runs the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from nesa_node.engine.weights.families import format_family_titles, get_family, require_servable
from nesa_node.engine.weights.side_files import read_json

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


MAX_BLOCKS = 1024
MAX_LABELS = 10_000
_NUM_BLOCKS_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def read_raw_config(folder: Path, *, name: str) -> dict[str, Any]:
    """Return the parsed `config.json`. Raises `ModelNotFoundError`, `CorruptCheckpointError`."""
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
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"{name} is quantized already ({method or 'unknown method'}), which cannot be served; "
            "use the original checkpoint in float32, float16 or bfloat16"
        )
    if "model_type" not in raw and "auto_map" in raw:
        raise UnsupportedModelError(
            f"{name} needs its own Python code (auto_map), which is never run. "
            f"These families can be served: {format_family_titles()}"
        )
    family = get_family(raw.get("model_type"), name=name)
    _check_counts(raw, folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers validates configs with exceptions of many types, some its own.
        raise CorruptCheckpointError(f"{folder / 'config.json'}: {error}") from error
    require_servable(family, config, name=name)
    if not isinstance(config, PreTrainedConfig):
        raise CorruptCheckpointError(f"{folder / 'config.json'} is no model config")
    # With the package `kernels` installed, a hub name here would download and run machine code.
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def _check_counts(raw: Mapping[str, object], path: Path) -> None:
    """Raises `CorruptCheckpointError` for counts from which transformers builds oversized lists.

    A config of fifty bytes may ask for a billion labels.
    """
    for key, most in (("num_labels", MAX_LABELS), *((key, MAX_BLOCKS) for key in _NUM_BLOCKS_KEYS)):
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
