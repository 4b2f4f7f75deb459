"""Sampled digests, which tell sets of weights apart without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from nesa_node.engine.safetensors_file import TensorInfo, read_window

WINDOW_BYTES = 256
WINDOWS = 8


def sample_digests(folder: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return a digest per tensor: of its name, dtype, shape and `WINDOWS` windows of its bytes.

    Windows are at both ends and evenly between, so that retrained weights differ in them; a single
    changed value elsewhere goes unnoticed. How tensors are spread over files does not matter.
    """
    return {name: _sample(folder, name, info) for name, info in tensors.items()}


def _sample(folder: Path, name: str, info: TensorInfo) -> str:
    digest = hashlib.sha256(f"{name}\0{info.dtype}\0{list(info.shape)}\0".encode())
    last = max(info.nbytes - WINDOW_BYTES, 0)
    for start in sorted({last * index // (WINDOWS - 1) for index in range(WINDOWS)}):
        digest.update(read_window(folder, info, start, min(WINDOW_BYTES, info.nbytes - start)))
    return digest.hexdigest()
