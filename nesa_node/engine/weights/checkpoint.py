"""Model checkpoint: config and tensors, and the model id by which nodes find each other."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from nesa_node.core.errors import (
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsafeCheckpointError,
)
from nesa_node.core.ids import ModelId
from nesa_node.engine.weights.families import (
    DTYPES,
    ModelFamily,
    get_context_length,
    parse_dtype,
    read_raw_config,
)
from nesa_node.engine.weights.files import (
    DIFFUSION_INDEX_FILE,
    INDEX_FILE,
    Progress,
    TensorInfo,
    read_header,
    read_json,
    read_window,
)
from nesa_node.engine.weights.formats.quantization_config import find_format
from nesa_node.engine.weights.formats.stored_format import StoredFormat, Tensors, map_tensors
from nesa_node.engine.weights.language_models import find_family, read_language_config
from nesa_node.engine.weights.pipeline_folder import is_pipeline, read_pipeline_index

WINDOW_BYTES = 256
WINDOWS_PER_TENSOR = 8


def sample_digests(folder: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return a digest per tensor: of its name, dtype, shape and `WINDOWS_PER_TENSOR` windows of its
    bytes.

    Windows are at both ends and evenly between, so that retrained weights differ in them; a single
    changed value elsewhere goes unnoticed. How tensors are spread over files does not matter.
    """
    digests = {}
    for name, info in tensors.items():
        digest = hashlib.sha256(f"{name}\0{info.dtype}\0{list(info.shape)}\0".encode())
        last = max(info.nbytes - WINDOW_BYTES, 0)
        windows = range(WINDOWS_PER_TENSOR)
        for start in sorted({last * index // (WINDOWS_PER_TENSOR - 1) for index in windows}):
            length = min(WINDOW_BYTES, info.nbytes - start)
            digest.update(read_window(folder, info, start, length))
        digests[name] = digest.hexdigest()
    return digests


def hash_tensor(tensor: Tensor) -> bytes:
    """SHA-256 of a CPU tensor's dtype, shape and little-endian values: 32 bytes."""
    made = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
    made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.digest()


class ReadConfig(Protocol):
    """`read_language_config`, or a like function for more models."""

    def __call__(self, folder: Path, *, name: str) -> PreTrainedConfig: ...


SINGLE_FILE = "model.safetensors"
WEIGHT_FILES = {
    INDEX_FILE: SINGLE_FILE,
    DIFFUSION_INDEX_FILE: "diffusion_pytorch_model.safetensors",
}
"""The index of several files, and the name of a single one."""
MAX_WEIGHT_FILES = 2048
_PICKLE_SUFFIX = re.compile(r"\.(bin|pt|pth|ckpt|pkl|h5|msgpack)$")


@dataclass(eq=False, repr=False)
class Checkpoint(ABC):
    """Read-only checkpoint. `tensors` describes all tensors, also those not downloaded yet.

    Of a quantized checkpoint they are the model's, each of which is made from one or several of
    those in the files (`stored`).
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    stored: dict[str, TensorInfo]
    stored_format: StoredFormat | None = None
    tensors: Tensors = field(init=False)
    read_digests: dict[str, bytes] | None = field(default=None, init=False)
    """If given, `read` puts the `hash_tensor` of each tensor there as it was read."""
    _family: ModelFamily | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._map_tensors()

    def _map_tensors(self) -> None:
        stated = self.config.dtype
        dtype = stated if isinstance(stated, torch.dtype) else None
        self.tensors = map_tensors(self.stored, self.stored_format, dtype, name=self.name)

    def _find_files(self, names: Iterable[str]) -> set[str]:
        return {file for name in names for file in self.tensors[name].files}

    @property
    def family(self) -> ModelFamily:
        """Raises `UnsupportedModelError` as `find_family` does."""
        if self._family is None:
            self._family = find_family(self.config)
        return self._family

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        return get_context_length(self.family, self.config)

    @abstractmethod
    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        """Download the files of these tensors, if missing, and verify them. Blocks the thread.

        Raises `DiskLimitError`, `CorruptCheckpointError`, `ModelNotFoundError`.
        """

    @abstractmethod
    def download_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the bytes of the hub's files that hold these tensors; of a folder, none."""

    @abstractmethod
    def require_download_allowed(self, names: Iterable[str]) -> None:
        """Raise `DiskLimitError` where `fetch` would, for the limit of one model's files."""

    @abstractmethod
    def fetch_side_files(self) -> Path:
        """Return a folder with the tokenizer and the generation config. Blocks the thread."""

    @abstractmethod
    def tensor_digests(self) -> Mapping[str, str]:
        """Return digests that identify the weights (`checkpoint.py`)."""

    def read(self, name: str) -> Tensor:
        """Read one fetched tensor into new CPU memory, in the checkpoint's dtype; a quantized
        weight as the values that it stands for.

        Raises `CorruptCheckpointError`.
        """
        tensor = self.tensors[name].read(self.folder)
        if self.read_digests is not None:
            self.read_digests[name] = hash_tensor(tensor)
        return tensor

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


class LocalCheckpoint(Checkpoint):
    """A folder with `config.json` and `model.safetensors`, or its shards and their index."""

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        files = self._find_files(names)
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            raise ModelNotFoundError(f"{self.folder} no longer has {', '.join(sorted(missing))}")

    def download_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        return {}

    def require_download_allowed(self, names: Iterable[str]) -> None:
        pass

    def fetch_side_files(self) -> Path:
        return self.folder

    def tensor_digests(self) -> Mapping[str, str]:
        return sample_digests(self.folder, self.stored)


def open_folder(folder: Path, read: ReadConfig = read_language_config) -> LocalCheckpoint:
    folder = folder.resolve()
    config = read(folder, name=folder.name)
    present = {str(path.relative_to(folder)) for path in _list_files(folder)}
    tensors: dict[str, TensorInfo] = {}
    for prefix, files in find_weights(present, folder, name=folder.name).items():
        for file in files:
            tensors |= {
                prefix + key: info for key, info in read_header(folder / file, file).items()
            }
    return LocalCheckpoint(
        folder.name, folder, config, tensors, read_format(folder, name=folder.name)
    )


def read_format(folder: Path, *, name: str) -> StoredFormat | None:
    """Return the format that the config in `folder` tells of; None where weights are plain.

    Raises as `read_raw_config` and `find_format` do.
    """
    return find_format(read_raw_config(folder, name=name), name=name)


def _list_files(folder: Path) -> Iterable[Path]:
    """Files of a checkpoint, and of a pipeline's networks."""
    return (path for path in (*folder.iterdir(), *folder.glob("*/*")) if path.is_file())


def find_weights(present: set[str], folder: Path, *, name: str) -> dict[str, tuple[str, ...]]:
    """The safetensors files of a checkpoint, by the prefix that the names of their tensors get.

    Of a pipeline each network's name is one. `present` are paths of files below the checkpoint's
    folder. Raises as `list_weight_files` does.
    """
    if not is_pipeline(folder):
        own = {path for path in present if "/" not in path}
        return {"": list_weight_files(own, folder, name=name)}
    found = {}
    for part in read_pipeline_index(folder, name=name).parts:
        inside = {path.removeprefix(f"{part}/") for path in present if path.startswith(f"{part}/")}
        files = list_weight_files(inside, folder / part, name=f"{name}/{part}")
        found[f"{part}."] = tuple(f"{part}/{file}" for file in files)
    return found


def list_weight_files(present: set[str], folder: Path, *, name: str) -> tuple[str, ...]:
    """Return the safetensors files of a checkpoint from the file names `present` in it.

    `folder` must hold the index, if there is one. Raises `UnsafeCheckpointError` where only pickled
    weights exist, `CorruptCheckpointError` for a bad index, and `ModelNotFoundError` where a file
    is missing.
    """
    for index, single in WEIGHT_FILES.items():
        if index in present:
            files = _read_index(folder / index)
            if missing := sorted(set(files) - present):
                raise ModelNotFoundError(f"{name} lacks {', '.join(missing)}, which {index} names")
            return files
        if single in present:
            return (single,)
    if pickled := sorted(file for file in present if _PICKLE_SUFFIX.search(file)):
        raise UnsafeCheckpointError(
            f"{name} has its weights as {pickled[0]}, which can run code when it is opened, and no "
            "safetensors. Where you trust it, convert it once: AutoModelForCausalLM"
            ".from_pretrained(MODEL).save_pretrained(FOLDER), with the tokenizer's save_pretrained "
            "too, and use FOLDER"
        )
    raise ModelNotFoundError(f"{name} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_index(index: Path) -> tuple[str, ...]:
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


# Config keys outside the architecture, which differ between two saves of one model.
_IGNORED_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "_diffusers_version",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}


def compute_model_id(checkpoint: Checkpoint) -> ModelId:
    """Return `name@digest`, with 16 hex digits of SHA-256 over the config and the weights.

    Weights count by the hub's file hashes, or for a local folder by their headers and a sample of
    every tensor's bytes (`checkpoint.py`). So a folder and its hub repository are two swarms, as
    are folders of the same name with different weights. Reads the folder; blocks the thread.
    """
    config = _architecture(read_raw_config(checkpoint.folder, name=checkpoint.name))
    if is_pipeline(checkpoint.folder):
        config["parts"] = {part: _architecture(each) for part, each in config["parts"].items()}
    identity = [config, checkpoint.tensor_digests()]
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return ModelId(f"{checkpoint.name}@{hashlib.sha256(canonical.encode()).hexdigest()[:16]}")
