"""Which format a checkpoint has, by the `quantization_config` of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.weights.formats.compressed import (
    PACKED_BITS,
    CompressedFormat,
    PackedScheme,
)
from nesa_node.engine.weights.formats.packed_columns import AwqFormat, GptqFormat
from nesa_node.engine.weights.formats.small_floats import Fp8Format, Mxfp4Format
from nesa_node.engine.weights.formats.stored_format import MAX_BLOCK, StoredFormat

_Size = Annotated[int, Meta(ge=1, le=MAX_BLOCK)]
_GroupSize = Annotated[int, Meta(ge=-1, le=MAX_BLOCK)]
"""-1: a matrix has one group."""
MAX_SCHEMES = 64
"""Groups of layers that compressed-tensors quantizes differently."""


def _check_group_size(size: int | None) -> None:
    if size == 0:
        raise ValueError("groups have no size")


class _Fp8(Struct):
    weight_block_size: tuple[_Size, _Size] | None = None


def _make_fp8(config: Mapping[str, Any]) -> StoredFormat:
    size = msgspec.convert(config, _Fp8).weight_block_size
    return Fp8Format(() if size is None else (size,))


class _Gptq(Struct):
    bits: Literal[2, 3, 4, 8]
    group_size: _GroupSize = 128
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    is_marlin_format: bool | None = None
    dynamic: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_group_size(self.group_size)
        if self.is_marlin_format:
            raise ValueError("weights are in Marlin's order")


def _make_gptq(config: Mapping[str, Any]) -> StoredFormat:
    read = msgspec.convert(config, _Gptq)
    offset = 0 if read.checkpoint_format == "gptq_v2" else 1
    return GptqFormat(read.bits, read.group_size, offset, bool(read.dynamic))


class _Awq(Struct):
    bits: Literal[4] = 4
    group_size: _GroupSize = 128
    version: Literal["gemm"] = "gemm"
    zero_point: bool = True

    def __post_init__(self) -> None:
        _check_group_size(self.group_size)
        if not self.zero_point:
            raise ValueError("weights have no zero points")


def _make_awq(config: Mapping[str, Any]) -> StoredFormat:
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    known = {names.get(key, key): value for key, value in config.items()}
    if isinstance(version := known.get("version"), str):
        known["version"] = version.lower()
    return AwqFormat(msgspec.convert(known, _Awq).group_size)


class _CompressedWeights(Struct):
    num_bits: Literal[2, 4, 8] = 8
    type: Literal["int", "float"] = "int"
    group_size: _GroupSize | None = None
    block_structure: tuple[_Size, _Size] | None = None

    def __post_init__(self) -> None:
        _check_group_size(self.group_size)


class _CompressedGroup(Struct):
    weights: _CompressedWeights | None = None


class _Sparsity(Struct):
    format: Literal["dense"] = "dense"


class _Transforms(Struct):
    config_groups: Annotated[dict[str, Any], Meta(max_length=0)] | None = None


_CompressedName = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
]


class _Compressed(Struct):
    format: _CompressedName
    config_groups: Annotated[dict[str, _CompressedGroup], Meta(max_length=MAX_SCHEMES)]
    sparsity_config: _Sparsity | None = None
    transform_config: _Transforms | None = None


def _make_compressed(config: Mapping[str, Any]) -> StoredFormat:
    read = msgspec.convert(config, _Compressed)
    schemes: dict[PackedScheme, None] = {}
    blocks: dict[tuple[int, int], None] = {}
    for group in read.config_groups.values():
        if (weights := group.weights) is None:
            continue
        size = None if weights.group_size == -1 else weights.group_size
        if weights.type == "int" and weights.num_bits in PACKED_BITS:
            schemes[PackedScheme(weights.num_bits, size)] = None
        if weights.block_structure is not None:
            blocks[weights.block_structure] = None
        if size is not None:
            blocks[1, size] = None
    return CompressedFormat(tuple(schemes), tuple(blocks))


def _make_mxfp4(config: Mapping[str, Any]) -> StoredFormat:
    return Mxfp4Format()


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    "fp8": _make_fp8,
    "fbgemm_fp8": _make_fp8,
    "gptq": _make_gptq,
    "awq": _make_awq,
    "compressed-tensors": _make_compressed,
    "mxfp4": _make_mxfp4,
}


def find_format(raw: Mapping[str, Any], *, name: str) -> StoredFormat | None:
    """Return the format that a parsed `config.json` tells of; None for weights as they are.

    Raises `UnsupportedModelError` for a method, or settings of one, that cannot be read.
    """
    config = raw.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    make = _METHODS.get(method) if isinstance(method, str) else None
    if make is None:
        raise UnsupportedModelError(
            f"{name} is quantized in a way that cannot be served ({method!a:.80}); use a "
            f"checkpoint in float32, float16 or bfloat16, or one of {', '.join(_METHODS)}"
        )
    try:
        return make(config)
    except ValueError as error:  # msgspec's, and of keys that are no UTF-8
        told = str(error).encode("ascii", "replace").decode()
        raise UnsupportedModelError(
            f"{name}: its quantization_config ({method}) cannot be served: {told:.300}; "
            "docs/checkpoints.md lists what can"
        ) from error
