"""Weights in 2 to 8 bits as GPTQ and AWQ pack them: inputs first, some in each 32-bit word.

I inputs, O outputs, G groups of inputs, W words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from nesa_node.engine.weights.files import TensorInfo
from nesa_node.engine.weights.formats.quantized_tensor import (
    GROUPS,
    SCALE,
    VALUES,
    ZERO,
    Grid,
    QuantizedTensor,
    read_scale,
    unpack_integers,
)
from nesa_node.engine.weights.formats.stored_format import PLAIN_DTYPES, StoredTensors

GPTQ_BITS = (2, 3, 4, 8)
_INTEGERS = (torch.int32,)


@dataclass(frozen=True, slots=True)
class _GptqLayout:
    """Words hold the values of successive inputs: [W, O]. Those of zero points, outputs': [G, W].

    AutoGPTQ's first format stores zero points less one (`zero_offset` 1), its second as they are.
    """

    bits: int
    group_size: int
    zero_offset: int

    def read_grid(self, stored: Mapping[str, Tensor]) -> Grid:
        zero_GO = unpack_integers(stored[ZERO], self.bits).to(torch.float32) + self.zero_offset
        group_I = stored.get(GROUPS)
        if group_I is not None:
            in_order = torch.arange(len(group_I)) // self.group_size
            # Left at zero where columns are not in another order.
            is_unused = not group_I.any() or torch.equal(group_I.to(torch.int64), in_order)
            group_I = None if is_unused else group_I.to(torch.int64)
        scale_OG = read_scale(stored[SCALE]).T.contiguous()
        return Grid(scale_OG, zero_GO.T.contiguous(), 1, self.group_size, group_I)

    def read_rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        return unpack_integers(values[:, start:stop].T, self.bits)


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """AutoGPTQ's and GPTQModel's files. Source: GPTQ, arXiv 2210.17323."""

    bits: int
    group_size: int
    """-1: a matrix has one group."""
    zero_offset: int
    has_exceptions: bool
    """Some matrices have other bits, or groups of another size, than the config says."""

    def describe(self, stored: StoredTensors) -> Iterator[QuantizedTensor]:
        for name in [each for each in stored.infos if each.endswith(".qweight")]:
            path = name.removesuffix(".qweight")
            values = stored.require(name, _INTEGERS)
            scale = stored.require(f"{path}.scales", PLAIN_DTYPES)
            zero = stored.require(f"{path}.qzeros", _INTEGERS)
            groups = stored.find(f"{path}.g_idx", (torch.int32, torch.int64), (1,))
            bits = self._find_bits(values, groups)
            inputs, rest = divmod(values.shape[0] * 32, bits)
            size = self._find_group_size(inputs, scale.shape[0])
            shape = (values.shape[1], inputs)
            groups_found = (-(-inputs // size), shape[0])
            packed = (scale.shape[0], shape[0] * bits // 32)
            is_whole = not rest and shape[0] * bits % 32 == 0
            known = is_whole and scale.shape == groups_found and zero.shape == packed
            if not known or (groups is not None and groups.shape != (inputs,)):
                raise ValueError(
                    f"{path} has qweight{list(values.shape)}, scales{list(scale.shape)} and "
                    f"qzeros{list(zero.shape)}, which do not belong together in {bits} bits and "
                    f"groups of {size}"
                )
            parts = {VALUES: values, SCALE: scale, ZERO: zero}
            if groups is not None:
                parts[GROUPS] = groups
            layout = _GptqLayout(bits, size, self.zero_offset)
            dtype = stored.choose_dtype(scale)
            yield QuantizedTensor(f"{path}.weight", shape, dtype, parts, layout)

    def _find_bits(self, values: TensorInfo, groups: TensorInfo | None) -> int:
        if self.has_exceptions and groups is not None:
            bits = Fraction(values.shape[0] * 32, groups.shape[0])
            if bits in GPTQ_BITS:
                return int(bits)
        return self.bits

    def _find_group_size(self, inputs: int, groups: int) -> int:
        if self.has_exceptions:
            return -(-inputs // groups)
        return inputs if self.group_size == -1 else self.group_size


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, counted from its lowest bits, of each of eight successive outputs."""


def _unpack_awq(words: Tensor) -> Tensor:
    """Words [R, W] to 4-bit numbers [8 W, R], float32."""
    words_WR = words.T.contiguous()
    numbers = torch.empty((len(words_WR), len(_AWQ_ORDER), len(words)), dtype=torch.float32)
    for output, place in enumerate(_AWQ_ORDER):
        numbers[:, output] = (words_WR >> 4 * place) & 15
    return numbers.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _AwqLayout:
    """Words hold the values of eight successive outputs: [I, W], and of zero points [G, W]."""

    group_size: int

    def read_grid(self, stored: Mapping[str, Tensor]) -> Grid:
        scale_OG = read_scale(stored[SCALE]).T.contiguous()
        return Grid(scale_OG, _unpack_awq(stored[ZERO]), 1, self.group_size)

    def read_rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        return _unpack_awq(values[:, start // 8 : stop // 8])


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """AutoAWQ's files of the version `gemm`, in 4 bits. Source: AWQ, arXiv 2306.00978."""

    group_size: int
    """-1: a matrix has one group."""

    def describe(self, stored: StoredTensors) -> Iterator[QuantizedTensor]:
        for name in [each for each in stored.infos if each.endswith(".qweight")]:
            path = name.removesuffix(".qweight")
            values = stored.require(name, _INTEGERS)
            scale = stored.require(f"{path}.scales", PLAIN_DTYPES)
            zero = stored.require(f"{path}.qzeros", _INTEGERS)
            inputs, words = values.shape
            size = inputs if self.group_size == -1 else self.group_size
            groups = -(-inputs // size)
            if scale.shape != (groups, 8 * words) or zero.shape != (groups, words):
                raise ValueError(
                    f"{path} has qweight{list(values.shape)}, scales{list(scale.shape)} and "
                    f"qzeros{list(zero.shape)}, which do not belong together in groups of {size}"
                )
            parts = {VALUES: values, SCALE: scale, ZERO: zero}
            shape, dtype = (8 * words, inputs), stored.choose_dtype(scale)
            yield QuantizedTensor(f"{path}.weight", shape, dtype, parts, _AwqLayout(size))
