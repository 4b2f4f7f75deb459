"""GGUF files as checkpoints: a config, tensors of transformers' names, a tokenizer.

A GGUF file holds all of a model. What transformers reads from files beside the weights is written
once to a folder under the cache, so that the rest of the program, and transformers, find it there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers import PreTrainedConfig

from nesa_node.core.errors import ConfigError
from nesa_node.engine.gguf.header import GgufHeader, part_paths, read_gguf_header
from nesa_node.engine.gguf.settings import read_settings
from nesa_node.engine.gguf.tensors import Parameter, TensorMap, read_parameter
from nesa_node.engine.gguf.tokenizer import has_tokenizer, write_tokenizer
from nesa_node.engine.weights.checkpoint import (
    LocalCheckpoint,
    ReadConfig,
    hash_tensor,
    open_folder,
    sample_digests,
)
from nesa_node.engine.weights.files import TensorInfo
from nesa_node.engine.weights.language_models import read_language_config
from nesa_node.engine.weights.model_tree import make_empty_model

GGUF_FOLDER = "gguf"
"""Folder under the cache for what transformers reads beside the weights of GGUF files."""
GGUF_SUFFIX = ".gguf"
_MAX_NAME = 64
_FORMAT = 1
"""Raised when these files are written otherwise, so that old ones are not used."""
_CONFIG_FILE = "config.json"
_TOKENIZER_FILE = "tokenizer.json"


class GgufCheckpoint(LocalCheckpoint):
    """A GGUF file. `folder` has its config and, once they are fetched, the files of its tokenizer.

    A tensor is read as float32 where it is stored in blocks, or was changed by the converter.
    """

    def __init__(
        self,
        header: GgufHeader,
        folder: Path,
        config: PreTrainedConfig,
        parameters: Mapping[str, Parameter],
    ) -> None:
        tensors = {name: _describe(parameter) for name, parameter in parameters.items()}
        super().__init__(header.name, folder, config, tensors)
        self._header = header
        self._parameters = parameters

    def read(self, name: str) -> Tensor:
        """Read one tensor as the model has it. Raises `CorruptCheckpointError`."""
        tensor = read_parameter(self._parameters[name])
        if self.read_digests is not None:
            self.read_digests[name] = hash_tensor(tensor)
        return tensor

    def fetch_side_files(self) -> Path:
        """Raises `UnsupportedModelError` for a tokenizer that cannot be read."""
        if has_tokenizer(self._header) and not (self.folder / _TOKENIZER_FILE).is_file():
            with FileLock(self.folder / ".lock"):
                partial = Path(mkdtemp(prefix=".tokenizer.", dir=self.folder))
                try:
                    shutil.copy(self.folder / _CONFIG_FILE, partial)
                    write_tokenizer(self._header, partial)
                    (partial / _CONFIG_FILE).unlink()
                    # Last the file by which the rest is known to be there.
                    made = sorted(partial.iterdir(), key=lambda path: path.name == _TOKENIZER_FILE)
                    for path in made:
                        path.replace(self.folder / path.name)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        return self.folder

    def tensor_digests(self) -> Mapping[str, str]:
        stored = {
            f"{name} {tensor.block.name} {list(tensor.shape)}": TensorInfo(
                (tensor.nbytes,), torch.uint8, tensor.nbytes, str(tensor.file), tensor.offset
            )
            for name, tensor in self._header.tensors.items()
        }
        return sample_digests(self.folder, stored)


def _describe(parameter: Parameter) -> TensorInfo:
    first = parameter.parts[0].tensor
    dtype = parameter.dtype
    nbytes = torch.Size(parameter.shape).numel() * dtype.itemsize
    return TensorInfo(parameter.shape, dtype, nbytes, str(first.file), first.offset)


def open_gguf(
    path: Path, cache_dir: Path, read: ReadConfig = read_language_config
) -> GgufCheckpoint:
    """Open a GGUF file, or all parts of a split one by any of them. Reads its header only.

    Writes its config to a folder under `cache_dir`, from which `read` reads it as that of any
    model. Raises `ModelNotFoundError`, `UnsupportedModelError` and `CorruptCheckpointError`.
    """
    header = read_gguf_header(path.absolute())
    architecture, config, generation = read_settings(header)
    texts = {
        _CONFIG_FILE: _to_json(config),
        "generation_config.json": _to_json(generation),
    }
    folder = _write_folder(header, texts, cache_dir)
    parsed = read(folder, name=header.name)
    model = make_empty_model(parsed)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    parameters = TensorMap(header, architecture, parsed, shapes).find_parameters()
    return GgufCheckpoint(header, folder, parsed, parameters)


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _write_folder(header: GgufHeader, texts: Mapping[str, str], cache_dir: Path) -> Path:
    """Write a model's configs under the cache, unless they are there; returns their folder."""
    said = "\0".join((str(_FORMAT), header.digest, *texts.values()))
    name = f"{header.name[:_MAX_NAME]}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    parent = cache_dir.resolve() / GGUF_FOLDER
    target = parent / name
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / ".lock"):
        if not target.is_dir():
            partial = Path(mkdtemp(prefix=".config.", dir=parent))
            try:
                for file, text in texts.items():
                    (partial / file).write_text(text, encoding="utf-8")
                partial.chmod(0o755)
                os.replace(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def find_gguf(model: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder without a config.

    Of a split model, the first part. Raises `ConfigError` for a folder with several models.
    """
    if model.suffix == GGUF_SUFFIX and model.is_file():
        return model
    if not model.is_dir() or (model / _CONFIG_FILE).exists():
        return None
    found = sorted(
        {part_paths(path)[0] for path in model.glob(f"*{GGUF_SUFFIX}") if path.is_file()}
    )
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise ConfigError(f"{model} holds several GGUF models: name one of {names}")
    return found[0] if found else None


def open_local(
    path: Path, cache_dir: Path, read: ReadConfig = read_language_config
) -> LocalCheckpoint:
    """Open a folder of safetensors, a GGUF file, or a folder that holds one.

    Raises as `open_folder` and `open_gguf` do.
    """
    if (file := find_gguf(path)) is not None:
        return open_gguf(file, cache_dir, read)
    return open_folder(path, read)
