"""One side of a block's KV cache: keys or values, as they are computed or in 8 bits.

In 8 bits each head of each token is int8 codes and one bfloat16 scale: a value is code x scale.
Keys are quantized after their rotation, as attention reads them. `docs/decisions/044` has what that
costs, and what was measured beside it.

H key/value heads, D head size, S slots of the pool (one token each), L tokens, B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.core.settings.choices import CacheDtype

MAX_CODE = 127
MIN_SCALE = 2.0**-100
"""A head with a smaller scale becomes zeros: quotients by it could overflow."""
SCALE_DTYPE = torch.bfloat16
"""It has float32's range. Codes are made with the rounded scale, so that its rounding costs nothing
but a step that is up to 0.4 % larger."""


def count_head_bytes(dim: int, dtype: torch.dtype, cache_dtype: CacheDtype) -> int:
    """Bytes of one token's key or value of one head."""
    if cache_dtype == "int8":
        return dim + SCALE_DTYPE.itemsize
    return dim * dtype.itemsize


def quantize_heads(values_LHD: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [L, H, D] (int8, -127 to 127) and scales [L, H] (bfloat16) of any floating dtype.

    A value is within half a scale of code x scale, and a scale within 0.4 % of the head's largest
    |value| / 127. A head with a value that is not finite has a scale that is not: NaN propagates.
    """
    wide_LHD = values_LHD.float()
    scales_LH = (wide_LHD.abs().amax(-1) / MAX_CODE).to(SCALE_DTYPE)
    is_zero_LH = scales_LH < MIN_SCALE
    divisors_LH = scales_LH.float().masked_fill_(is_zero_LH, torch.inf)
    codes_LHD = (wide_LHD / divisors_LH.unsqueeze(-1)).round_().clamp_(-MAX_CODE, MAX_CODE)
    return codes_LHD.to(torch.int8), scales_LH.masked_fill_(is_zero_LH, 0)


def dequantize_heads(codes_HLD: Tensor, scales_HL: Tensor, dtype: torch.dtype) -> Tensor:
    """Code x scale, rounded to `dtype`; the two sides may have any equal leading dimensions."""
    # A code has 7 bits and a scale 8, so that a product in bfloat16 is rounded once, too. float16
    # has too small a range for a scale.
    if dtype is torch.float16:
        return (codes_HLD.float() * scales_HL.float().unsqueeze(-1)).to(dtype)
    return codes_HLD.to(dtype).mul_(scales_HL.to(dtype).unsqueeze(-1))


@dataclass(frozen=True, slots=True, eq=False)
class CacheSide:
    """Keys or values of one block."""

    stored_SHD: Tensor
    """Values in `dtype`, or int8 codes."""
    scales_SH: Tensor | None
    """Of codes, bfloat16; None for values."""
    dtype: torch.dtype
    """Of what is written and read."""

    @classmethod
    def allocate(
        cls,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        cache_dtype: CacheDtype,
        device: torch.device,
    ) -> CacheSide:
        """Uninitialized memory of `shape` [S, H, D]."""
        if cache_dtype == "auto":
            return cls(torch.empty(shape, dtype=dtype, device=device), None, dtype)
        codes_SHD = torch.empty(shape, dtype=torch.int8, device=device)
        return cls(codes_SHD, torch.empty(shape[:2], dtype=SCALE_DTYPE, device=device), dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of its memory, each with a slot's part at the slot's index."""
        return (self.stored_SHD,) if self.scales_SH is None else (self.stored_SHD, self.scales_SH)

    @property
    def slot_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self.tensors)

    def write(self, slots: slice | Tensor, new_LHD: Tensor) -> None:
        """Write keys or values of any floating dtype, on this side's device, to `slots`."""
        if self.scales_SH is None:
            _put(self.stored_SHD, slots, new_LHD)
            return
        codes_LHD, scales_LH = quantize_heads(new_LHD)
        _put(self.stored_SHD, slots, codes_LHD)
        _put(self.scales_SH, slots, scales_LH)

    def read(self, slots: slice | Tensor) -> Tensor:
        """Keys or values [L, H, D] of `slots`: a view where they are stored so, in one piece."""
        if self.scales_SH is None:
            return self.stored_SHD[slots]
        return dequantize_heads(self.stored_SHD[slots], self.scales_SH[slots], self.dtype)

    def read_bytes(self, slots: slice | Tensor) -> Tensor:
        """What is stored of `slots`, as bytes [L, B]: codes, then scales."""
        parts = [tensor[slots].flatten(1).view(torch.uint8) for tensor in self.tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write_bytes(self, slots: slice | Tensor, bytes_LB: Tensor) -> None:
        """Write what `read_bytes` read, here or elsewhere.

        Raises `ProtocolError` for codes and scales that `quantize_heads` cannot have made, and for
        values that are not finite; then nothing is written.
        """
        sizes = [tensor[0].nbytes for tensor in self.tensors]
        parts = [
            # Copied: a view of another dtype has to begin at a multiple of its size.
            part_LB.contiguous().view(tensor.dtype).view(-1, *tensor.shape[1:])
            for part_LB, tensor in zip(
                torch.split(bytes_LB, sizes, dim=1), self.tensors, strict=True
            )
        ]
        if self.scales_SH is not None:
            self._check(*parts)
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor[slots] = part.to(tensor.device)

    def _check(self, codes_LHD: Tensor, scales_LH: Tensor) -> None:
        largest_LH = (scales_LH.float() * MAX_CODE).to(self.dtype)
        if not largest_LH.isfinite().all():
            raise ProtocolError("not_finite", "a scale of the cache is NaN or too large")
        if (scales_LH < 0).any() or (codes_LHD < -MAX_CODE).any():
            raise ProtocolError("bad_tensor", "codes below -127, or negative scales")


def _put(target: Tensor, slots: slice | Tensor, new: Tensor) -> None:
    if isinstance(slots, slice):
        target[slots] = new
    else:
        target.index_copy_(0, slots, new.to(target.dtype))
