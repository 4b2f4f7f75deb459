"""`int8`: integers from -127 to 127 and one scale per block.

Legend: N blocks, B values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nesa_node.compression.apart import EightBits
from nesa_node.compression.codec import SMALLEST, require_finite

_LEVELS = 127
_LARGEST_SCALE = 2.6793e36
"""127 times this is still a float32."""


@dataclass(frozen=True, slots=True)
class Int8(EightBits):
    """value = signed integer * scale; the scale is the block's largest |value| / 127."""

    name: ClassVar[str] = "int8"

    def _quantize(self, values_NB: Tensor) -> tuple[Tensor, Tensor]:
        absmax_N1 = values_NB.abs().amax(-1, keepdim=True)
        require_finite(absmax_N1)
        # Rounding must not make 127 scales of the largest numbers infinite.
        scale_N1 = (absmax_N1 * (1 / _LEVELS)).clamp_(max=_LARGEST_SCALE)
        scale_N1.masked_fill_(absmax_N1 < SMALLEST, 0)
        factor_N1 = scale_N1.reciprocal().masked_fill_(scale_N1 == 0, 0)
        return scale_N1, (values_NB * factor_N1).round_().to(torch.int8)

    def _dequantize(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()

    def _bound(self, absmax_N1: Tensor) -> Tensor:
        """Half a step: the largest |value| / 254, and 2^-100."""
        return absmax_N1 / (2 * _LEVELS) * (1 + 2.0**-12) + SMALLEST
