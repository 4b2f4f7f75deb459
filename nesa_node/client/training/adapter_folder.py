"""The result of training as a folder that PEFT loads: weights as safetensors, and their config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save
from torch import Tensor

from nesa_node.client.training.checkpoint_file import dump_json, write_atomically
from nesa_node.engine.training.adapters import BottleneckConfig, DeepPromptConfig

if TYPE_CHECKING:
    from nesa_node.engine.training.training_spec import AdapterConfig

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PREFIX = "adapter."


def save_adapter(
    folder: Path, config: AdapterConfig, state: Mapping[str, Tensor], *, base_model: str
) -> None:
    """Write the adapters of a state (`SpanState.tensors`) with their config. Raises `OSError`.

    Adapters that PEFT does not have get a config of this project's, with names alike.
    """
    weights = {
        name.removeprefix(_PREFIX): value.contiguous()
        for name, value in state.items()
        if name.startswith(_PREFIX)
    }
    write_atomically(folder / WEIGHTS_NAME, save(weights, {"format": "pt"}))
    write_atomically(folder / CONFIG_NAME, dump_json(_describe(config, base_model)))


def _describe(config: AdapterConfig, base_model: str) -> dict[str, Any]:
    if isinstance(config, BottleneckConfig | DeepPromptConfig):
        kind = "NESA_BOTTLENECK" if isinstance(config, BottleneckConfig) else "NESA_DEEP_PROMPT"
        return {"peft_type": kind, "base_model_name_or_path": base_model, **asdict(config)}
    written = copy.deepcopy(config)
    written.base_model_name_or_path = base_model
    written.inference_mode = True
    fields: dict[str, Any] = written.to_dict()
    return {name: _to_json(value) for name, value in fields.items()}


def _to_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {name: _to_json(each) for name, each in value.items()}
    return getattr(value, "value", value)
