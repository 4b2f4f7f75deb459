"""Rewriting a saved model's tensors, as other tools and versions lay them out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def rewritten(
    folder: Path, target: Path, change: Callable[[Tensors], Tensors] = lambda tensors: tensors
) -> Path:
    """Copy a single-file model, its tensors changed. Returns `target`."""
    shutil.copytree(folder, target)
    tensors = change(load_file(target / "model.safetensors"))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    return target


def set_config(folder: Path, **values: object) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(values)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder
