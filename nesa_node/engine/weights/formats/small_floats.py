"""Weights in 8-bit and 4-bit floats with scales: FP8, MXFP4 and NVFP4.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3) for blocks of 128 x 128, OCP Microscaling
Formats (MX) specification 1.0 for 4-bit values and exponents; transformers, gpt-oss and
compressed-tensors for names.

E experts, O outputs, G groups of 32 inputs, B bytes of two values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.engine.weights.formats.quantized_tensor import (
    FLOAT8,
    GLOBAL_SCALE,
    SCALE,
    VALUES,
    QuantizedTensor,
    RowLayout,
)
from nesa_node.engine.weights.formats.stored_format import StoredTensors, describe_scaled


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Each matrix of 8-bit floats has a scale beside it, by which its values are multiplied."""

    blocks: tuple[tuple[int, int], ...]

    def describe(self, stored: StoredTensors) -> Iterator[QuantizedTensor]:
        for name, info in stored.infos.items():
            if info.dtype not in FLOAT8:
                continue
            path = name.removesuffix(".weight")
            names = [f"{name}_scale_inv", f"{name}_scale", f"{path}.scale", f"{path}.qscale_weight"]
            for scale in names:
                if scale in stored.infos:
                    yield describe_scaled(stored, name, scale, self.blocks)
                    break


MX_GROUP, NV_GROUP = 32, 16
"""Values that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor((*_MAGNITUDES, *(-each for each in _MAGNITUDES)), dtype=torch.float32)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=1)
"""Both values of each byte [256, 2], that in its lower bits first."""
EXPONENT_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def unpack_float4(packed: Tensor) -> Tensor:
    """Return the values of bytes [..., B] as float32 [..., 2 B]."""
    pairs = _PAIRS.index_select(0, packed.reshape(-1).to(torch.int32))
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _unpack_groups(packed: Tensor) -> Tensor:
    """Return the values of groups [O, G, B] as float32 [O, 2 G B]."""
    return unpack_float4(packed.flatten(1))


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """gpt-oss' experts: blocks [E, O, G, 16] and scales [E, O, G], of a weight [E, I, O]."""

    def describe(self, stored: StoredTensors) -> Iterator[QuantizedTensor]:
        for name in [each for each in stored.infos if each.endswith("_blocks")]:
            path = name.removesuffix("_blocks")
            values = stored.require(name, (torch.uint8,), (4,))
            scale = stored.require(f"{path}_scales", EXPONENT_DTYPES, (3,))
            experts, outputs, groups, width = values.shape
            if scale.shape != values.shape[:3] or width != MX_GROUP // 2:
                raise ValueError(
                    f"{path} has blocks{list(values.shape)} and scales{list(scale.shape)}, which "
                    "do not belong together"
                )
            inputs = groups * MX_GROUP
            layout = RowLayout(outputs, inputs, 1, MX_GROUP, _unpack_groups)
            shape, dtype = (experts, inputs, outputs), stored.choose_dtype(scale)
            parts = {VALUES: values, SCALE: scale}
            yield QuantizedTensor(path, shape, dtype, parts, layout, is_transposed=True)


def describe_float4(stored: StoredTensors, path: str) -> QuantizedTensor:
    """The weight of a linear layer `path`, as compressed-tensors stores it in MXFP4 or NVFP4.

    NVFP4 has a global scale besides, which divides the scales. Raises `ValueError`.
    """
    values = stored.require(f"{path}.weight_packed", (torch.uint8,))
    overall = stored.find(f"{path}.weight_global_scale", (torch.float32,), (0, 1))
    group = MX_GROUP if overall is None else NV_GROUP
    kinds = EXPONENT_DTYPES if overall is None else (torch.float8_e4m3fn,)
    scale = stored.require(f"{path}.weight_scale", kinds)
    outputs, inputs = values.shape[0], 2 * values.shape[1]
    is_whole = overall is None or overall.numel == 1
    if not is_whole or scale.shape != (outputs, -(-inputs // group)):
        raise ValueError(
            f"{path} has weight_packed{list(values.shape)} and weight_scale{list(scale.shape)}, "
            "which do not belong together"
        )
    parts = {VALUES: values, SCALE: scale}
    if overall is not None:
        parts[GLOBAL_SCALE] = overall
    layout = RowLayout(outputs, inputs, 1, group, unpack_float4, divides=True)
    dtype = stored.choose_dtype(scale)
    return QuantizedTensor(f"{path}.weight", (outputs, inputs), dtype, parts, layout)
