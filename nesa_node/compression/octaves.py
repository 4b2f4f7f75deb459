"""One-byte scales of blocks: eighths of an octave below the largest value of the tensor.

Legend: R rows, D channels, N blocks.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError

OCTAVE = 8
LAST = 255
FACTOR_BITS = 15
LARGEST = 2.0**100
"""Larger values are refused: sums of them, or the largest after rounding, could overflow."""


def factor_of(values_RD: Tensor) -> float:
    """The power of two by which the largest |value| is scaled to [2^14, 2^15), for float16.

    It is at least 2^-100. Raises `ProtocolError("not_finite")`, or `ProtocolError("bad_tensor")`
    for values beyond 2^100.
    """
    ends = torch.stack(torch.aminmax(values_RD)).tolist()
    if not all(map(math.isfinite, ends)):
        raise ProtocolError("not_finite", "the tensor holds NaN or infinite values")
    largest = max(map(abs, ends))
    if largest > LARGEST:
        raise ProtocolError("bad_tensor", f"a value of {largest:g} is too large for the codec")
    exponent = math.frexp(largest)[1] - FACTOR_BITS if largest else 0
    return 2.0 ** max(exponent, -100)


def eighths(absmax_N1: Tensor, largest: float) -> Tensor:
    """Unrounded scale codes: 255 for `largest`, 8 less for its half. Overwrites `absmax_N1`."""
    return absmax_N1.mul_(1 / largest).log2_().mul_(OCTAVE).add_(LAST)


def scales_of(codes_N: Tensor, unit: float) -> Tensor:
    """The scales of codes s (uint8), float32 [N]: `unit` 2^((s - 255)/8), or 0 for s = 0."""
    return _parts(codes_N.device).index_select(0, codes_N.int()).mul_(unit)


@functools.lru_cache(maxsize=8)
def _parts(device: torch.device) -> Tensor:
    """The scale of each code relative to the unit, float32 [256]."""
    values = [0.0, *(2.0 ** ((code - LAST) / OCTAVE) for code in range(1, LAST + 1))]
    return torch.tensor(values, dtype=torch.float32, device=device)
