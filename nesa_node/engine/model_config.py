"""Reading a model's config without running any of its code."""

from __future__ import annotations

import json
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
from nesa_node.engine.families import family_of, require_servable, served_families

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_raw_config(folder: Path, *, name: str) -> dict[str, Any]:
    """Return `config.json` as it stands. Raises `ModelNotFoundError`, `CorruptCheckpointError`."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"{name}: {path} does not exist; a model folder holds config.json and *.safetensors"
        ) from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CorruptCheckpointError(f"{path} is no JSON object")
    return raw


def read_config(folder: Path, *, name: str) -> PreTrainedConfig:
    """Return the config of a model that can be served. Raises `UnsupportedModelError` for others.

    Code that a checkpoint brings along (`auto_map`) is never run: a model type that transformers
    does not know itself is refused.
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
            f"These families can be served: {served_families()}"
        )
    family = family_of(raw.get("model_type"), name=name)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers validates configs with exceptions of many kinds, some its own.
        raise CorruptCheckpointError(f"{folder / 'config.json'}: {error}") from error
    require_servable(family, config, name=name)
    if not isinstance(config, PreTrainedConfig):
        raise CorruptCheckpointError(f"{folder / 'config.json'} is no model config")
    return config


def parse_dtype(text: str) -> torch.dtype | None:
    """Return the dtype named, or None for `auto`. Raises `ConfigError`."""
    if text == "auto":
        return None
    dtype = DTYPES.get(text.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {text!r}")
    return dtype
