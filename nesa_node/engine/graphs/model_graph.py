"""The graph of a model of transformers, of its config alone: no weights are read or made."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.weights.families import check_counts, read_raw_config
from nesa_node.sharding.capture import CapturedModel, capture


@dataclass(frozen=True, slots=True)
class InputSizes:
    """How large a request is."""

    batch: int = 1
    tokens: int = 128
    """Of a text, at most what the model has positions for."""
    image_size: int | None = None
    """Pixels of each side; None for what the config says, or 224."""


def capture_model(
    folder: Path, *, name: str, dtype: torch.dtype, sizes: InputSizes
) -> CapturedModel:
    """The graph of one forward pass of the model in `folder`, by its `config.json`.

    The first of its `architectures` is what is captured. Code in a checkpoint is never run. Raises
    `ModelNotFoundError`, `CorruptCheckpointError`, `UnsupportedModelError` for what transformers
    has no class for, and `UnsupportedFeatureError` where its course depends on values.
    """
    config = _read_task_config(folder, name=name)
    model_class = _find_class(config, name)
    try:
        with torch.device("meta"):
            model = model_class(config)
            model.to(dtype)  # type: ignore[arg-type]
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"{folder / 'config.json'}: {model_class.__name__} cannot be made of it ({error})"
        ) from error
    return capture(model, (), example_inputs(model, sizes, dtype))


def _read_task_config(folder: Path, *, name: str) -> PreTrainedConfig:
    raw = read_raw_config(folder, name=name)
    if "model_type" not in raw:
        raise UnsupportedModelError(f"{name}: {folder / 'config.json'} has no model_type")
    check_counts(raw, folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers validates configs with exceptions of many types, some its own.
        raise CorruptCheckpointError(f"{folder / 'config.json'}: {error}") from error
    if not isinstance(config, PreTrainedConfig):
        raise CorruptCheckpointError(f"{folder / 'config.json'} is no model config")
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def _find_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    architectures = config.architectures or ()
    for architecture in architectures:
        found = getattr(transformers, str(architecture), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise UnsupportedModelError(
        f"{name}: transformers has no class {', '.join(map(str, architectures)) or '(none named)'}"
        "; its config.json names it under architectures"
    )


def example_inputs(model: PreTrainedModel, sizes: InputSizes, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of the shapes that `model` takes, on the meta device."""
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    text = getattr(config, "text_config", None) or config
    most = getattr(text, "max_position_embeddings", None) or sizes.tokens
    ids = torch.zeros(sizes.batch, min(sizes.tokens, most), dtype=torch.long, device="meta")
    vision = getattr(config, "vision_config", None) or config
    given: dict[str, Any] = {}
    main = model.main_input_name
    if main == "input_features":
        features_BMF = sizes.batch, config.num_mel_bins, 2 * config.max_source_positions
        given[main] = torch.zeros(*features_BMF, dtype=dtype, device="meta")
    elif main == "pixel_values" or "pixel_values" in accepted:
        size = sizes.image_size or _image_size(vision)
        image_BCHW = sizes.batch, getattr(vision, "num_channels", 3), size, size
        given["pixel_values"] = torch.zeros(*image_BCHW, dtype=dtype, device="meta")
    if main == "input_ids" or (main == "pixel_values" and "input_ids" in accepted):
        given["input_ids"] = ids
    if main not in given:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {main}: models of input_ids, pixel_values and "
            "input_features can be planned"
        )
    if "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = ids
    if "use_cache" in accepted:
        given["use_cache"] = False
    return given


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", None)
    if isinstance(size, list | tuple):
        size = max(size)
    return size if isinstance(size, int) else 224
