"""Model checkpoint: config and tensors, from a local folder or the hub, and its identity."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from nesa_node.core.errors import (
    ConfigError,
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsafeCheckpointError,
)
from nesa_node.engine.digests import sample_digests
from nesa_node.engine.families import FAMILIES, Family, context_length
from nesa_node.engine.model_config import DTYPES, parse_dtype, read_config, read_raw_config
from nesa_node.engine.progress import Progress
from nesa_node.engine.safetensors_file import TensorInfo, read_header, read_tensor
from nesa_node.engine.side_files import INDEX_FILE, read_json

SINGLE_FILE = "model.safetensors"
MAX_WEIGHT_FILES = 2048
_PICKLES = re.compile(r"\.(bin|pt|pth|ckpt|pkl|h5|msgpack)$")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Checkpoint(ABC):
    """Read-only checkpoint. `tensors` describes all tensors, also those not downloaded yet."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: PreTrainedConfig,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self.name = name
        self.folder = folder
        self.config = config
        self.tensors = tensors

    @property
    def family(self) -> Family:
        return FAMILIES[self.config.model_type]

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        return context_length(self.family, self.config)

    @abstractmethod
    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        """Download the files of these tensors, if missing, and verify them. Blocks the thread.

        Raises `DiskLimitError`, `CorruptCheckpointError`, `ModelNotFoundError`.
        """

    @abstractmethod
    def fetch_side_files(self) -> Path:
        """Return a folder with the tokenizer and the generation config. Blocks the thread."""

    @abstractmethod
    def tensor_digests(self) -> Mapping[str, str]:
        """Return digests that identify the weights (`model_id.py`)."""

    def read(self, name: str) -> Tensor:
        """Read one fetched tensor into new CPU memory, in the checkpoint's dtype."""
        return read_tensor(self.folder, self.tensors[name])

    def resolve_dtype(self, text: str) -> torch.dtype:
        """Return the dtype named; `auto` is that of the stored weights.

        Raises `ConfigError` for unknown names.
        """
        dtype = parse_dtype(text)
        if dtype is not None:
            return dtype
        stated = self.config.dtype
        if isinstance(stated, torch.dtype) and stated in DTYPES.values():
            return stated
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.numel
        return max(DTYPES.values(), key=lambda candidate: sizes[candidate])

    def raw_config(self) -> dict[str, object]:
        return read_raw_config(self.folder, name=self.name)


class LocalCheckpoint(Checkpoint):
    """A folder with `config.json` and `model.safetensors`, or its shards and their index."""

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        missing = {self.tensors[name].file for name in names} - set(self._files())
        if missing:
            raise ModelNotFoundError(f"{self.folder} no longer has {', '.join(sorted(missing))}")

    def fetch_side_files(self) -> Path:
        return self.folder

    def tensor_digests(self) -> Mapping[str, str]:
        return sample_digests(self.folder, self.tensors)

    def _files(self) -> Iterable[str]:
        return (path.name for path in self.folder.iterdir())


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path,
    max_disk_bytes: int | None = None,
    evicts: bool = False,
    endpoint: str | None = None,
) -> Checkpoint:
    """Open a local folder, or a hub repository by name (its config and headers only).

    Blocks the thread. `open_hub` explains how the cache under `cache_dir` is bounded. Raises
    `ModelNotFoundError`, `UnsupportedModelError`, `UnsafeCheckpointError`,
    `CorruptCheckpointError`, `DiskLimitError`, and `ConfigError` for a revision of a folder.
    """
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"a revision names a version on the hub; {folder} is a local folder")
        return open_folder(folder)
    if folder.exists() or not _HUB_NAME.fullmatch(model) or model.startswith("."):
        raise ModelNotFoundError(
            f"{model} is no folder; give a folder with config.json and *.safetensors, "
            "or a name on the hub such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    # Lazy: huggingface_hub reads its environment variables on import.
    from nesa_node.engine.hub import open_hub

    return open_hub(
        model,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        max_disk_bytes=max_disk_bytes,
        evicts=evicts,
        endpoint=endpoint,
    )


def open_folder(folder: Path) -> LocalCheckpoint:
    folder = folder.resolve()
    config = read_config(folder, name=folder.name)
    files = weight_files({path.name for path in folder.iterdir()}, folder, name=folder.name)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(folder / file, file))
    return LocalCheckpoint(folder.name, folder, config, tensors)


def weight_files(present: set[str], folder: Path, *, name: str) -> tuple[str, ...]:
    """Return the safetensors files of a checkpoint from the file names `present` in it.

    `folder` must hold the index, if there is one. Raises `UnsafeCheckpointError` where only pickled
    weights exist, `CorruptCheckpointError` for a bad index, and `ModelNotFoundError` where a file
    is missing.
    """
    if INDEX_FILE in present:
        files = _indexed_files(folder / INDEX_FILE)
        if missing := sorted(set(files) - present):
            raise ModelNotFoundError(f"{name} lacks {', '.join(missing)}, which {INDEX_FILE} names")
        return files
    if SINGLE_FILE in present:
        return (SINGLE_FILE,)
    if pickled := sorted(file for file in present if _PICKLES.search(file)):
        raise UnsafeCheckpointError(
            f"{name} has its weights as {pickled[0]}, which can run code when it is opened, and no "
            "safetensors. Where you trust it, convert it once: AutoModelForCausalLM"
            ".from_pretrained(MODEL).save_pretrained(FOLDER), with the tokenizer's save_pretrained "
            "too, and use FOLDER"
        )
    raise ModelNotFoundError(f"{name} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_files(index: Path) -> tuple[str, ...]:
    try:
        files = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{index} is no safetensors index ({error!r})") from error
    if len(files) > MAX_WEIGHT_FILES:
        raise CorruptCheckpointError(f"{index} names {len(files)} files, more than any model has")
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CorruptCheckpointError(f"{index} names {file!r}, which is no file beside it")
    return tuple(files)
