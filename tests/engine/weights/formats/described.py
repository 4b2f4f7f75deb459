"""Tensors of a file as a format describes them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nesa_node.engine.weights.files import read_header
from nesa_node.engine.weights.formats.stored_format import StoredFormat, Tensors, map_tensors


def described(
    folder: Path, tensors: dict[str, Tensor], stored_format: StoredFormat | None
) -> Tensors:
    """Write tensors to `folder` and describe them."""
    save_file(tensors, folder / "m.safetensors")
    stored = read_header(folder / "m.safetensors", "m.safetensors")
    return map_tensors(stored, stored_format, torch.float32, name="m")
