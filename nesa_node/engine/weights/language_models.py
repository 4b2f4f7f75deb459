"""Which checkpoints are language models that can be cut into blocks, and how each is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.weights.families import (
    FAMILIES,
    ModelFamily,
    check_counts,
    format_family_titles,
    is_known_type,
    parse_config,
    read_config,
    read_network_config,
    read_raw_config,
)
from nesa_node.engine.weights.model_tree import MisfitError, read_family

_MAX_KEPT = 64
_kept: OrderedDict[str, ModelFamily | str] = OrderedDict()
"""Families, or why there is none, by the config that they were read from."""
_kept_lock = threading.Lock()


def find_family(config: Any) -> ModelFamily:
    """Return the family of a config: its row in the table, else what its module tree says.

    The latter takes about a second the first time. Raises `UnsupportedModelError`.
    """
    if (row := FAMILIES.get(config.model_type)) is not None:
        return row
    key = config.to_json_string(use_diff=False)
    with _kept_lock:
        found = _kept.get(key)
    if found is None:
        try:
            found = read_family(config)
        except MisfitError as error:
            found = (
                f"{config.model_type} models cannot be served: {error}. "
                f"These families can: {format_family_titles()}"
            )
        except UnsupportedModelError as error:
            found = str(error)
        with _kept_lock:
            _kept[key] = found
            while len(_kept) > _MAX_KEPT:
                _kept.popitem(last=False)
    if isinstance(found, str):
        raise UnsupportedModelError(found)
    return found


def is_language_model(folder: Path, *, name: str) -> bool:
    """Whether a checkpoint is, by its config, a causal decoder that can be cut into blocks.

    Its config may name no architecture, or the model without a head; a model with a head for
    something else is none. Raises as `read_raw_config` does.
    """
    raw = read_raw_config(folder, name=name)
    kind, named = raw.get("model_type"), raw.get("architectures")
    if not isinstance(kind, str) or not is_known_type(kind):
        return False
    name_of_class = str(named[0]) if isinstance(named, list) and named else ""
    is_causal = "For" not in name_of_class or "ForCausalLM" in name_of_class
    if kind in FAMILIES or not is_causal:
        return is_causal
    check_counts(raw, folder / "config.json")
    try:
        find_family(parse_config(folder))
    except UnsupportedModelError:
        return False
    return True


def read_language_config(folder: Path, *, name: str) -> PreTrainedConfig:
    """Return the config of a model that can be cut into blocks.

    Raises as `read_config` and `find_family` do.
    """
    config = read_config(folder, name=name)
    find_family(config)
    return config


def read_any_config(folder: Path, *, name: str) -> PreTrainedConfig:
    """Return the config of a language model as `read_language_config` does, or of a network."""
    read = read_language_config if is_language_model(folder, name=name) else read_network_config
    return read(folder, name=name)
