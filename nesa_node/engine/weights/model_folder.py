"""A model whose blocks were trained, as a folder that transformers, and this program, load."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nesa_node.engine.weights.checkpoint import SINGLE_FILE, Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton

_SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Of the tokenizer's files, the generation config and chat templates."""


def write_model(
    folder: Path, checkpoint: Checkpoint, blocks: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Write `checkpoint` with other weights of its blocks, all in `dtype`; its weights come last.

    `blocks` are all tensors of all blocks, by transformers' names. Raises `OSError`, and what
    `Skeleton.load` raises for the rest of the model.
    """
    skeleton = Skeleton(checkpoint)
    rest = [name for name in skeleton.tensor_names if name not in blocks]
    skeleton.load(rest, dtype=dtype, device=torch.device("cpu"), task="reading the ends")
    found = skeleton.model.state_dict()
    tensors = {name: value.to(dtype).contiguous() for name, value in blocks.items()}
    seen: set[int] = set()
    for name in rest:
        if found[name].data_ptr() not in seen:  # of tied tensors, one is stored
            tensors[name] = found[name]
            seen.add(found[name].data_ptr())
    folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.fetch_side_files().iterdir():
        if path.suffix in _SIDE_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = copy.deepcopy(checkpoint.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{SINGLE_FILE}.")
    os.close(handle)
    try:
        save_file(tensors, name, {"format": "pt"})
        os.chmod(name, 0o644)
        os.replace(name, folder / SINGLE_FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
