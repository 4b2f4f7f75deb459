"""PEFT folders of LoRA adapters, which other machines wrote: read within bounds, and checked.

A published adapter consists of two files. `adapter_config.json` is normalized: only what applying
an adapter needs, in one spelling, and no path of its author's machine. `adapter_model.safetensors`
is the author's own file. The digest of both names the adapter.

Nothing here depends on PEFT, which nodes and gateways may lack.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.errors import AdapterError, ModelError
from nesa_node.core.ids import is_model_name
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.files import TensorInfo, parse_header, parse_json, read_tensor
from nesa_node.engine.weights.skeleton import Skeleton

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_METRICS_FILE = "metrics.json"
"""Figures of the training, which `nesa-node finetune` writes: a name and a number each."""
MAX_CONFIG_FILE_BYTES = 64 * 1024
MAX_HEADER_FILE_BYTES = 1 << 20
"""Header of an adapter's safetensors file: about 120 bytes for each tensor."""
MAX_ADAPTER_TENSORS = 8192
MAX_TARGETS = 4096
MAX_RANK = 1024

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TENSOR_PATTERN = re.compile(
    r"base_model\.model\.(?P<path>\w+(?:\.\w+){1,15})\.lora_(?P<side>[AB])\.weight", re.ASCII
)
_LAYER_PATTERN = re.compile(r"\.\d{1,5}\.")
_EXPERTS = "experts"
_DIGEST_PREFIX = b"nesa-node adapter 1\0"

_IGNORED_KEYS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights",
        "loftq_config", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
        "revision", "task_type", "corda_config", "eva_config", "lora_ga_config",
    }
)  # fmt: skip
"""Keys of PEFT's config that say how an adapter was begun or trained, not what it computes."""
_SELECTING_KEYS = ("exclude_modules", "layers_pattern", "layers_to_transform")
"""Keys that narrow `target_modules`; the tensors' names say the same."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def _as_tuple(value: object) -> object:
    if isinstance(value, list | tuple | dict) and len(value) > MAX_TARGETS:
        raise ValueError(f"must have at most {MAX_TARGETS} items")
    return tuple(value) if isinstance(value, list) else value


# PEFT reads the keys of patterns as regular expressions: these have none that can be slow.
_ModuleKey = Annotated[str, Field(pattern=r"^\^?[A-Za-z0-9_.]{1,200}$")]
_ModulePath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,200}$")]
_Rank = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=MAX_RANK)]
_Alpha = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1e6)]


class LoraFields(BaseModel):
    """Normalized `adapter_config.json`: PEFT's keys, with PEFT's meanings.

    `target_modules` are names or paths of modules, never a regular expression.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"
    base_model_name_or_path: str = Field(max_length=128)
    inference_mode: Literal[True] = True
    r: _Rank
    lora_alpha: _Alpha
    target_modules: Annotated[
        tuple[_ModulePath, ...], BeforeValidator(_as_tuple), Field(min_length=1)
    ]
    rank_pattern: Annotated[dict[_ModuleKey, _Rank], BeforeValidator(_as_tuple)] = Field(
        default_factory=dict
    )
    alpha_pattern: Annotated[dict[_ModuleKey, _Alpha], BeforeValidator(_as_tuple)] = Field(
        default_factory=dict
    )
    bias: Literal["none"] = "none"
    fan_in_fan_out: bool = False
    use_rslora: bool = False

    def encode(self) -> bytes:
        """The one spelling of this config."""
        fields = self.model_dump(mode="json")
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def find_untargeted(self, paths: Iterable[str]) -> str | None:
        """The first of `paths` at which PEFT would put no adapter; None if there is none."""
        targets = frozenset(self.target_modules)
        for path in paths:
            parts = path.split(".")
            if not any(".".join(parts[start:]) in targets for start in range(len(parts))):
                return path
        return None


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What was read of an adapter's folder. `config` is the normalized config, as published."""

    config: bytes
    digest: str
    nbytes: int
    rank: int
    target_modules: tuple[str, ...]


def combine_digests(config: bytes, weights_sha256: bytes) -> str:
    """An adapter's digest in hexadecimal, from its normalized config and its weights' SHA-256."""
    parts = hashlib.sha256(config).digest() + weights_sha256
    return hashlib.sha256(_DIGEST_PREFIX + parts).hexdigest()


LayerSizes = Mapping[str, tuple[int, int]]
"""Inputs and outputs of each linear layer of a model's blocks, by its path in the causal LM."""


def find_linear_layers(checkpoint: Checkpoint) -> LayerSizes:
    """The layers of a model's blocks that can have adapters. Reads no weights; blocks the thread.

    Raises `ModelError`.
    """
    skeleton = Skeleton(checkpoint)
    prefix = f"{skeleton.family.layers_path}."
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in skeleton.model.named_modules():
        if not path.startswith(prefix):
            continue
        if isinstance(module, nn.Linear):
            sizes[path] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            sizes[path] = inputs, outputs
    return sizes


def read_adapter_folder(folder: Path, base_model: str) -> AdapterSummary:
    """Read a folder that PEFT's `save_pretrained` wrote, and normalize its config.

    Blocks the thread. `base_model` is the name written in place of the folder's own. Raises
    `AdapterError` for a folder that is no adapter, or one that cannot be served.
    """
    weights_path = folder / ADAPTER_WEIGHTS_FILE
    if not weights_path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = (
            "its weights are pickled, which no node opens: save them again with PEFT's "
            "save_pretrained(FOLDER, safe_serialization=True)"
            if pickled
            else f"it has no {ADAPTER_WEIGHTS_FILE}; give the folder that PEFT's save_pretrained "
            "wrote"
        )
        raise AdapterError(f"{folder} is not an adapter that can be published: {hint}")
    content = _read_config_file(folder)
    fields = parse_json_object(content, what=str(folder / ADAPTER_CONFIG_FILE))
    tensors = _read_tensors(weights_path)
    config = _normalize(fields, tensors, base_model, what=str(folder / ADAPTER_CONFIG_FILE))
    return _summarize(folder, config, config.encode(), tensors)


def read_metrics(folder: Path) -> dict[str, float]:
    """Read the figures beside an adapter; none where there is no such file.

    Blocks the thread. Raises `AdapterError` for a file with anything but names and numbers.
    """
    path = folder / ADAPTER_METRICS_FILE
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError) as error:
        raise AdapterError(f"{path}: no names with a number each: {error}") from None


def check_adapter_folder(
    folder: Path, digest: str, layers: LayerSizes | None = None
) -> AdapterSummary:
    """Check an adapter that a peer sent: both files, their digest, names, shapes, finite values.

    Blocks the thread. With `layers`, those of the base model, each tensor must fit its layer.
    Raises `AdapterError`.
    """
    content = _read_config_file(folder)
    config = _parse_normalized(content)
    tensors = _read_tensors(folder / ADAPTER_WEIGHTS_FILE)
    summary = _summarize(folder, config, content, tensors)
    if summary.digest != digest:
        raise AdapterError(f"the files have the digest {summary.digest}, not {digest}")
    if layers is not None:
        check_fits(folder, layers)
    _check_finite(folder, tensors)
    return summary


def check_fits(folder: Path, layers: LayerSizes) -> None:
    """Raise `AdapterError` unless each tensor of an adapter fits a layer of its base model."""
    for path, pair in _pairs(_read_tensors(folder / ADAPTER_WEIGHTS_FILE)).items():
        size = layers.get(path)
        if size is None:
            raise AdapterError(f"the model's blocks have no linear layer {path}")
        inputs, outputs = pair["A"].shape[1], pair["B"].shape[0]
        if (inputs, outputs) != size:
            raise AdapterError(
                f"{path} has {size[0]} inputs and {size[1]} outputs in the model, {inputs} and "
                f"{outputs} in the adapter: it was trained for another model"
            )


def parse_json_object(content: bytes, *, what: str) -> dict[str, Any]:
    """Parse untrusted JSON of an adapter. Raises `AdapterError`."""
    try:
        value = parse_json(content, what=what)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    if not isinstance(value, dict):
        raise AdapterError(f"{what} is no JSON object")
    return value


def _read_config_file(folder: Path) -> bytes:
    try:
        with (folder / ADAPTER_CONFIG_FILE).open("rb") as stream:
            content = stream.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise AdapterError(
            f"{folder / ADAPTER_CONFIG_FILE} cannot be read: {error.strerror}"
        ) from None
    if len(content) > MAX_CONFIG_FILE_BYTES:
        raise AdapterError(
            f"{ADAPTER_CONFIG_FILE} of {folder} has more than {MAX_CONFIG_FILE_BYTES >> 10} KiB"
        )
    return content


def _normalize(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], base_model: str, *, what: str
) -> LoraFields:
    """Keep of PEFT's config what changes the result. Raises `AdapterError` for what is missing
    here."""
    if (kind := fields.get("peft_type")) != "LORA":
        raise AdapterError(f"{what}: peft_type {kind!r:.40}; LORA adapters can be published")
    known = {*LoraFields.model_fields, *_IGNORED_KEYS, *_SELECTING_KEYS}
    for key, value in fields.items():
        if value and key not in known:
            raise AdapterError(
                f"{what}: {key!r:.60} is set to {value!r:.60}, which no node can apply; train the "
                "adapter without it"
            )
    init = fields.get("init_lora_weights", True)
    if init not in (True, False, "gaussian"):
        raise AdapterError(
            f"{what}: init_lora_weights {init!r:.40} changes the base weights; convert the adapter "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    targets = fields.get("target_modules")
    if isinstance(targets, str) or any(fields.get(key) for key in _SELECTING_KEYS):
        targets = sorted(_pairs(tensors))
    kept = {name: fields[name] for name in LoraFields.model_fields if fields.get(name) is not None}
    kept |= {
        "target_modules": _sort_texts(targets),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": base_model if is_model_name(base_model) else "",
    }
    return _validate(kept, what=what)


def _sort_texts(value: object) -> object:
    """A list of texts sorted; anything else as it is, for the validation that follows."""
    is_sortable = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return sorted(value) if isinstance(value, list) and is_sortable else value


def _parse_normalized(content: bytes) -> LoraFields:
    """Parse what `LoraFields.encode` made. Raises `AdapterError` for any other spelling."""
    config = _validate(parse_json_object(content, what="its config"), what="its config")
    name = config.base_model_name_or_path
    if name and not is_model_name(name):
        raise AdapterError("its config names no model as its base")
    if config.encode() != content:
        raise AdapterError("its config is not normalized")
    return config


def _validate(fields: Mapping[str, Any], *, what: str) -> LoraFields:
    try:
        return LoraFields.model_validate(dict(fields))
    except (ValidationError, RecursionError) as error:
        words = "nested too deeply"
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise AdapterError(f"{what}: {words[:200]}") from None


def _read_tensors(path: Path) -> dict[str, TensorInfo]:
    """The tensors of an adapter's weights: few, matrices, and together the whole file.

    Raises `AdapterError`. Overlapping tensors would let a small file fill the memory of a reader.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:

            def read(start: int, count: int) -> bytes:
                stream.seek(start)
                return stream.read(count)

            length = int.from_bytes(read(0, 8), "little")
            if length > MAX_HEADER_FILE_BYTES:
                raise AdapterError(
                    f"the header of {path.name} claims {length} bytes; at most "
                    f"{MAX_HEADER_FILE_BYTES} are read of an adapter's"
                )
            tensors = parse_header(read, size, path.name, where=path.name)
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error)[:300]) from error
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    if not 0 < len(tensors) <= MAX_ADAPTER_TENSORS:
        raise AdapterError(f"{path.name} has {len(tensors)} tensors; 1 to {MAX_ADAPTER_TENSORS}")
    by_place = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    has_gap = any(one.offset + one.nbytes != two.offset for one, two in pairwise(by_place))
    if has_gap or by_place[0].offset != 8 + length or _end(by_place[-1]) != size:
        raise AdapterError(f"the tensors of {path.name} overlap, or leave bytes of it unused")
    return tensors


def _end(info: TensorInfo) -> int:
    return info.offset + info.nbytes


def _pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Both matrices of each adapted layer, A [rank, inputs] and B [outputs, rank], by its path.

    Raises `AdapterError`.
    """
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        found = _TENSOR_PATTERN.fullmatch(name)
        if found is None or _LAYER_PATTERN.search(found["path"]) is None:
            raise AdapterError(
                f"{name!r:.120} is no LoRA matrix of a layer in a block; only those are served"
            )
        if _EXPERTS in found["path"].split("."):
            raise AdapterError(
                f"{found['path']}: adapters of a mixture's experts are not served; train its other "
                "layers, as `nesa-node finetune` does unless --target-modules says otherwise"
            )
        if info.dtype not in _WEIGHT_DTYPES or len(info.shape) != 2 or not info.nbytes:
            raise AdapterError(f"{name}: {info.dtype} of shape {list(info.shape)} is no matrix")
        pairs.setdefault(found["path"], {})[found["side"]] = info
    for path, pair in pairs.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise AdapterError(f"{path}: lora_A and lora_B are not a pair")
    return pairs


def _summarize(
    folder: Path, config: LoraFields, content: bytes, tensors: Mapping[str, TensorInfo]
) -> AdapterSummary:
    """Check tensors against the config, and digest the weights. Raises `AdapterError`."""
    pairs = _pairs(tensors)
    ranks = {pair["A"].shape[0] for pair in pairs.values()}
    if not ranks <= {config.r, *config.rank_pattern.values()}:
        raise AdapterError(f"matrices of ranks {sorted(ranks)[:4]}; the config says {config.r}")
    if foreign := config.find_untargeted(pairs):
        raise AdapterError(f"target_modules of the config do not name {foreign}")
    path = folder / ADAPTER_WEIGHTS_FILE
    with path.open("rb") as stream:
        weights_sha256 = hashlib.file_digest(stream, "sha256").digest()
    return AdapterSummary(
        config=content,
        digest=combine_digests(content, weights_sha256),
        nbytes=len(content) + path.stat().st_size,
        rank=max(ranks),
        target_modules=tuple(sorted({each.rpartition(".")[2] for each in pairs})),
    )


def _check_finite(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise `AdapterError` for NaN or infinite values; reads one matrix at a time."""
    for name, info in tensors.items():
        if not torch.isfinite(read_tensor(folder, info)).all():
            raise AdapterError(f"{name} has values that are not finite")
