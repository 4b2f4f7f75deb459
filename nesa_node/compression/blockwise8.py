"""`blockwise8`: dynamic 8-bit blockwise quantization, as bitsandbytes does it.

Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (arXiv 1511.04561), and Dettmers
et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861). Here blocks end with the
row, and outliers have their own: bitsandbytes' run on into the next row, whatever is in them.

Legend: N blocks, B values of a block.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.apart import EightBits
from nesa_node.compression.codec import SMALLEST, require_finite

_DECADES = 7
_WORST = 0.9 / 128 + 2.0**-14
"""Half the largest distance of two neighbours in the map, and what bitsandbytes misses on the CPU.

There it looks codes up in a table of 2^16 steps: next to halfway it can take the second best.
"""


@dataclass(frozen=True, slots=True)
class Blockwise8(EightBits):
    """value = `dynamic_map()[code]` * scale; the scale is the block's largest |value|.

    Encoding imports bitsandbytes (seconds, once); decoding does without.
    """

    name: ClassVar[str] = "blockwise8"

    def _quantize(self, values_NB: Tensor) -> tuple[Tensor, Tensor]:
        require_finite(values_NB)
        count, width = values_NB.shape
        if width < self.block and not values_NB.is_cpu:
            # Its CUDA kernels know few sizes of blocks; zeros change nothing.
            values_NB = torch.nn.functional.pad(values_NB, (0, self.block - width))
        # What its `quantize_blockwise` calls, without a copy of the map in a state for each call.
        codes, absmax_N = _operators().quantize_blockwise.default(
            values_NB, dynamic_map(values_NB.device), values_NB.shape[1]
        )
        codes_NB = codes.view(count, -1)[:, :width].contiguous()
        return absmax_N.masked_fill_(absmax_N < SMALLEST, 0), codes_NB

    def _dequantize(self, codes: Tensor) -> Tensor:
        return dynamic_map(codes.device).index_select(0, codes.int())

    def _bound(self, absmax_N1: Tensor) -> Tensor:
        """The largest |value| times 0.9 / 128 + 2^-14, and 2^-100."""
        return absmax_N1 * _WORST * (1 + 2.0**-12) + SMALLEST


@functools.lru_cache(maxsize=8)
def dynamic_map(device: torch.device) -> Tensor:
    """[256] float32, rising: what each code stands for, as a part of the block's largest |value|.

    Zero, one, and with both signs in each of seven decades i = 0..6: the centres of 2^i equal parts
    of [0.1, 1], times 10^(i-6). Equal to `bitsandbytes.functional.create_dynamic_map()`.
    """
    positive: list[float] = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        centres = (edges[:-1] + edges[1:]) / 2
        positive += (10 ** (decade + 1 - _DECADES) * centres).tolist()
    values = sorted([0.0, 1.0, *positive, *(-value for value in positive)])
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _operators() -> Any:
    """Its operators. The import takes seconds and some 100 MiB, so that only users pay for it."""
    # It tells everybody that a kernel for 4-bit weights, which is not used here, is not there.
    noisy = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401  (it registers them)
    finally:
        noisy.setLevel(level)
    return torch.ops.bitsandbytes
