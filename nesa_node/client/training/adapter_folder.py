"""Adapters as folders that PEFT loads: weights as safetensors, and their config."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nesa_node.client.training.checkpoint_file import dump_json, write_atomically
from nesa_node.core.errors import ConfigError
from nesa_node.engine.training.adapters import BottleneckConfig, DeepPromptConfig
from nesa_node.engine.training.training_state import select_adapters

if TYPE_CHECKING:
    from peft import PeftConfig

    from nesa_node.engine.training.training_spec import AdapterConfig

    _Adapter = PeftConfig | BottleneckConfig | DeepPromptConfig

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_COMMON_FIELDS = ("peft_type", "base_model_name_or_path")


def save_adapter(
    folder: Path, config: _Adapter, state: Mapping[str, Tensor], *, base_model: str
) -> None:
    """Write the adapters of a state (`SpanState.tensors`) with their config. Raises `OSError`.

    Adapters that PEFT does not have get a config of this project's, with names alike.
    """
    weights = {name: value.contiguous() for name, value in select_adapters(state).items()}
    write_atomically(folder / WEIGHTS_NAME, save(weights, {"format": "pt"}))
    write_atomically(folder / CONFIG_NAME, dump_json(_describe(config, base_model)))


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Read what `save_adapter`, or PEFT, has written: the config, and parameters in float32.

    Raises `ConfigError` for a folder that has no adapter.
    """
    try:
        fields = json.loads((folder / CONFIG_NAME).read_text())
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            values: dict[str, Tensor] = {
                name: file.get_tensor(name).float()
                for name in file.keys()  # noqa: SIM118  # it is no dictionary
            }
        return _make_config(folder, fields), values
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{folder} has no adapter to go on with: {error}") from None


def _make_config(folder: Path, fields: dict[str, Any]) -> AdapterConfig:
    own = {name: value for name, value in fields.items() if name not in _COMMON_FIELDS}
    match fields["peft_type"]:
        case "NESA_BOTTLENECK":
            return BottleneckConfig(**own)
        case "NESA_DEEP_PROMPT":
            return DeepPromptConfig(**own)
        case _:
            from peft import PeftConfig

            config: PeftConfig = PeftConfig.from_pretrained(str(folder))
            config.inference_mode = False
            return config


def _describe(config: _Adapter, base_model: str) -> dict[str, Any]:
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
