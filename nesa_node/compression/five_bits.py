"""Packing of 5-bit codes: the low four bits two to a byte, then the fifth bits eight to a byte.

Legend: n codes, in eight parts of M = ceil(n / 8) codes each.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_LOW = 15
_FIFTH = 16


def packed_nbytes(count: int) -> int:
    return 5 * -(-count // 8)


def pack(codes: Tensor) -> Tensor:
    """Pack uint8 [n] below 32 into uint8 [5 M].

    The codes are cut into parts 0 to 7 of M codes each (the last is zero-padded). The first 4 M
    bytes hold the low bits of parts 0 to 3, and in their upper halves those of parts 4 to 7; bit k
    of the last M bytes holds the fifth bits of part k. So operations run on long rows.
    """
    parts_8M = torch.nn.functional.pad(codes, (0, -len(codes) % 8)).view(8, -1)
    low_4M = (parts_8M[:4] & _LOW) | (parts_8M[4:] << 4)
    fifth_XM = parts_8M >> 4 << _places(codes.device)
    while len(fifth_XM) > 1:
        half = len(fifth_XM) // 2
        fifth_XM = fifth_XM[:half] | fifth_XM[half:]
    return torch.cat((low_4M, fifth_XM)).view(-1)


def unpack(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack`: uint8 [n], of `packed_nbytes(n)` bytes."""
    bytes_5M = packed.view(5, -1)
    low_4M, fifth_1M = bytes_5M[:4], bytes_5M[4:]
    codes_8M = torch.cat((low_4M & _LOW, low_4M >> 4))
    codes_8M |= (fifth_1M >> _places(packed.device) << 4) & _FIFTH
    return codes_8M.view(-1)[:count]


@functools.lru_cache(maxsize=8)
def _places(device: torch.device) -> Tensor:
    """The bit positions 0 to 7, uint8 [8, 1]."""
    return torch.arange(8, dtype=torch.uint8, device=device).view(8, 1)
