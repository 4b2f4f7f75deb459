"""A LoRA adapter in PEFT's format, checked before its weights are read.

Its files come from strangers. PEFT is not used: importing it takes seconds and 120 MB, and it reads
whatever a config says. What is read here are numbers, names and shapes, each of them bounded;
settings that would change what an adapter computes, and are not known here, are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from nesa_node.core.errors import (
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsafeCheckpointError,
    UnsupportedModelError,
)
from nesa_node.engine.weights.files import TensorInfo, parse_json, read_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_ADAPTER_CONFIG_BYTES = 1 << 20
MAX_ADAPTER_BYTES = 4 << 30
MAX_RANK = 1024
MAX_PATTERNS = 2048
MAX_PATTERN_CHARS = 256
MAX_REGULAR_EXPRESSIONS = 32
MAX_QUANTIFIERS = 2
"""Bounds the time of a match: it grows with the name's length to the power of it."""
_MAX_SHOWN_CHARS = 200
Value = TypeVar("Value", int, float)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_IGNORED_KEYS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        # PEFT's tensors have the same shapes either way.
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
"""Keys of a config that say how an adapter was made, or which tensors its file has."""
_INIT_METHODS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initial values for which PEFT leaves the base weights as they are."""
_LITERAL_PATTERN = re.compile(r"[\w.]*")
_REGULAR_EXPRESSION = re.compile(r"[\w.^$|\[\]\\+*-]*")
_TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The two matrices of one linear layer: A [rank, inputs] and B [outputs, rank]."""

    rank: int
    scale: float
    """Of the product B A."""
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The part of PEFT's config that says what an adapter computes."""

    rank: int
    alpha: float
    uses_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def resolve(self, module: str) -> tuple[int, float]:
        """Return rank and scale of a module, by its path in the model, as PEFT does.

        The first key that matches the end of the path decides.
        """
        rank = _find_by_pattern(self.rank_pattern, module, self.rank)
        alpha = _find_by_pattern(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.uses_rslora else rank)


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """A folder with `adapter_config.json` and `adapter_model.safetensors`, checked but for values.

    Everything is known that loading will take: no tensor has been read.
    """

    folder: Path
    config: LoraConfig
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path, *, max_bytes: int = MAX_ADAPTER_BYTES) -> PeftFolder:
        """Read the config and the header of the weights. Blocks the thread.

        Raises `ModelNotFoundError` (a file is missing), `UnsafeCheckpointError` (pickled weights
        only), `UnsupportedModelError` (another kind of adapter, a setting that is not supported,
        weights of more than `max_bytes` or of another dtype than float32, float16 and bfloat16) and
        `CorruptCheckpointError`.
        """
        config = parse_lora_config(_read_config(folder), where=str(folder))
        path = folder / WEIGHTS_FILE
        if not path.is_file():
            if (folder / "adapter_model.bin").exists():
                raise UnsafeCheckpointError(
                    f"{folder} has its weights as adapter_model.bin, which can run code when it is "
                    f"opened; save the adapter as {WEIGHTS_FILE}"
                )
            raise ModelNotFoundError(f"{folder} has no {WEIGHTS_FILE}")
        if (size := path.stat().st_size) > max_bytes:
            raise UnsupportedModelError(
                f"{path} has {size / 2**20:.1f} MiB; adapters of at most {max_bytes >> 20} MiB are "
                "served here"
            )
        tensors = read_header(path, WEIGHTS_FILE)
        if not tensors:
            raise CorruptCheckpointError(f"{path} holds no tensors")
        for name, info in tensors.items():
            if info.dtype not in _DTYPES:
                raise UnsupportedModelError(
                    f"{path}: {_shown(name)} is {info.dtype}; adapters have float32, float16 or "
                    "bfloat16"
                )
        return cls(folder, config, tensors)

    def modules(
        self, layers_path: str, num_blocks: int, names: Sequence[str]
    ) -> dict[tuple[int, str], LoraModule]:
        """Return the adapted layers, by block and by the layer's name within it.

        `layers_path` is where the model has its blocks, `names` are the linear layers of each.
        Raises `UnsupportedModelError` for tensors of anything else, and `CorruptCheckpointError`
        where one of the two matrices is missing, or is not of the rank that the config says.
        """
        sides: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            match = _TENSOR_NAME.fullmatch(name)
            if match is None:
                raise UnsupportedModelError(
                    f"{self.folder}: {_shown(name)} is no matrix of a LoRA adapter; only these are "
                    "served"
                )
            sides.setdefault(match[1], {})[match[2]] = info
        found = {}
        known = set(names)
        for module, matrices in sides.items():
            block, _, name = module.removeprefix(f"{layers_path}.").partition(".")
            if (
                not module.startswith(f"{layers_path}.")
                or not re.fullmatch(r"0|[1-9][0-9]{0,5}", block)
                or int(block) >= num_blocks
                or name not in known
            ):
                raise UnsupportedModelError(
                    f"{self.folder} adapts {_shown(module)}, which is no linear layer of the "
                    f"model's {num_blocks} blocks"
                )
            found[int(block), name] = self._pair(module, matrices)
        return found

    def _pair(self, module: str, matrices: Mapping[str, TensorInfo]) -> LoraModule:
        if len(matrices) != 2:
            raise CorruptCheckpointError(
                f"{self.folder}: {_shown(module)} has one of its two matrices only"
            )
        rank, scale = self.config.resolve(module)
        a, b = matrices["A"], matrices["B"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise CorruptCheckpointError(
                f"{self.folder}: the matrices of {_shown(module)} have shapes {list(a.shape)} and "
                f"{list(b.shape)}; the config makes their rank {rank}"
            )
        return LoraModule(rank, scale, a, b)


def parse_lora_config(raw: object, *, where: str) -> LoraConfig:
    """Check a parsed `adapter_config.json`.

    Raises `UnsupportedModelError` for another kind of adapter, and for settings under which an
    adapter computes what is not known here; `CorruptCheckpointError` for values that no config has.
    """
    if not isinstance(raw, dict):
        raise CorruptCheckpointError(f"{where}: {CONFIG_FILE} is no JSON object")
    rest: dict[str, Any] = {key: raw[key] for key in raw if key not in _IGNORED_KEYS}
    kind = rest.pop("peft_type", None)
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{where} is an adapter of type {_shown(kind)}; nodes serve LORA"
        )
    if (bias := rest.pop("bias", "none")) != "none":
        raise UnsupportedModelError(f"{where}: bias={_shown(bias)} changes the model's own biases")
    init = rest.pop("init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in _INIT_METHODS:
        raise UnsupportedModelError(
            f"{where}: init_lora_weights={_shown(init)} changes the base weights; convert the "
            "adapter when you save it (PEFT's path_initial_model_for_weight_conversion)"
        )
    config = LoraConfig(
        rank=_check_rank(rest.pop("r", 8), where),
        alpha=_check_alpha(rest.pop("lora_alpha", 8), where),
        uses_rslora=_check_flag(rest.pop("use_rslora", False), where),
        rank_pattern={
            key: _check_rank(value, where)
            for key, value in _patterns(rest.pop("rank_pattern", None), where)
        },
        alpha_pattern={
            key: _check_alpha(value, where)
            for key, value in _patterns(rest.pop("alpha_pattern", None), where)
        },
    )
    for key, value in rest.items():
        if value:
            raise UnsupportedModelError(
                f"{where}: {_shown(key)} is set in {CONFIG_FILE}; nodes serve plain LoRA without it"
            )
    return config


def _read_config(folder: Path) -> object:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(
            f"{path} does not exist; an adapter's folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    with path.open("rb") as stream:
        content = stream.read(MAX_ADAPTER_CONFIG_BYTES + 1)
    if len(content) > MAX_ADAPTER_CONFIG_BYTES:
        raise CorruptCheckpointError(
            f"{path} has more than {MAX_ADAPTER_CONFIG_BYTES >> 20} MiB, more than any config"
        )
    parsed: object = parse_json(content, what=str(path))
    return parsed


def _check_rank(value: object, where: str) -> int:
    if type(value) is not int or value < 1:
        raise CorruptCheckpointError(f"{where}: {_shown(value)} is no rank")
    if value > MAX_RANK:
        raise UnsupportedModelError(f"{where}: rank {_shown(value)}; at most {MAX_RANK} is served")
    return value


def _check_alpha(value: object, where: str) -> float:
    # Beyond float32 a product would not be finite; an integer may be too large for any float.
    if type(value) not in (int, float) or not abs(value) <= torch.finfo(torch.float32).max:  # type: ignore[arg-type]
        raise CorruptCheckpointError(f"{where}: {_shown(value)} is no lora_alpha")
    return float(value)  # type: ignore[arg-type]


def _check_flag(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise CorruptCheckpointError(f"{where}: use_rslora is {_shown(value)}")
    return value


def _patterns(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield the items of a pattern, whose keys are checked."""
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise CorruptCheckpointError(f"{where}: a pattern is no object of <= {MAX_PATTERNS} keys")
    expressions = 0
    for key, each in value.items():
        if len(key) > MAX_PATTERN_CHARS:
            raise CorruptCheckpointError(f"{where}: pattern {_shown(key)} is too long")
        if not _LITERAL_PATTERN.fullmatch(key):
            expressions += 1
            _check_expression(key, where)
        yield key, each
    if expressions > MAX_REGULAR_EXPRESSIONS:
        raise UnsupportedModelError(
            f"{where}: a pattern has {expressions} regular expressions; at most "
            f"{MAX_REGULAR_EXPRESSIONS} are served"
        )


def _check_expression(key: str, where: str) -> None:
    quantifiers = key.count("*") + key.count("+")
    if not _REGULAR_EXPRESSION.fullmatch(key) or quantifiers > MAX_QUANTIFIERS:
        raise UnsupportedModelError(
            f"{where}: pattern {_shown(key)}: groups, and more than {MAX_QUANTIFIERS} of * and +, "
            "are not served; write out the modules' names"
        )
    try:
        re.compile(key)
    except re.error as error:
        raise CorruptCheckpointError(f"{where}: pattern {_shown(key)}: {error}") from error


def _find_by_pattern(pattern: Mapping[str, Value], module: str, otherwise: Value) -> Value:
    for key, value in pattern.items():
        if _matches(key, module):
            return value
    return otherwise


def _matches(key: str, module: str) -> bool:
    """Whether a key matches the end of a path, in linear time where it has no quantifiers."""
    if not _LITERAL_PATTERN.fullmatch(key):
        return re.match(rf"(.*\.)?({key})$", module) is not None
    start = len(module) - len(key)
    if start < 0 or (start > 0 and module[start - 1] != "."):
        return False
    pairs = zip(key, module[start:], strict=True)
    return all(wanted in (".", found) for wanted, found in pairs)


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS]
