"""The few channels that are much larger than the others, for every token: found, listed, set apart.

In a block with others they would set a scale at which these are lost.

Two codecs keep them in float16: the lower byte lies where the channel's code would, the upper one
apart.

Legend: R rows (tokens), D channels, C channels that are set apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nesa_node.compression.codec import part_of
from nesa_node.core.errors import ProtocolError

_SAMPLE = 64
"""Tokens that are enough to tell which channels are always large."""
_PEAK = 1 / 32
"""A channel that is large for one token only counts as if it were 1/32 of that for all."""


def largest_channels(values_RD: Tensor, count: int) -> Tensor:
    """The numbers of `count` channels of float32 values, rising, int64.

    Which ones is the sender's choice alone: the receiver is told.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values_RD.device)
    size_RD = values_RD.abs()
    some_RD = size_RD[:: max(1, len(size_RD) // _SAMPLE)]
    score_D = some_RD.mean(0) + size_RD.amax(0) * _PEAK
    return score_D.topk(count).indices.sort().values


def list_dtype(width: int) -> torch.dtype:
    """As which integers the channels are listed; 16 bits are unsigned."""
    return torch.int16 if width <= 2**16 else torch.int32


def read_list(data: memoryview, start: int, count: int, width: int) -> Tensor:
    """`count` >= 1 channels, int64, on the CPU. Raises `ProtocolError` unless they rise below D."""
    channels_C = part_of(data, start, count, list_dtype(width)).long()
    if width <= 2**16:
        channels_C &= 0xFFFF
    first, last = channels_C[0].item(), channels_C[-1].item()
    rising = bool((channels_C[1:] > channels_C[:-1]).all())
    if not rising or first < 0 or last >= width:
        raise ProtocolError("bad_tensor", "the channels apart are out of order or of range")
    return channels_C


def without(values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """The values with zeros in these channels."""
    return values_RD.index_fill(1, channels_C, 0) if len(channels_C) else values_RD


def bytes_of(values_RC: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The lower and the upper bytes of values / factor in float16, each uint8 [R, C]."""
    parts_RC2 = (values_RC / factor).half().contiguous().unsqueeze(-1).view(torch.uint8)
    return parts_RC2[..., 0], parts_RC2[..., 1]


def of_bytes(lower_RC: Tensor, upper_RC: Tensor, factor: float) -> Tensor:
    """What `bytes_of` took apart, float32 [R, C]."""
    parts_RC2 = torch.stack((lower_RC, upper_RC), -1)
    return parts_RC2.view(torch.float16)[..., 0].float() * factor


def half_bound(values_RC: Tensor, factor: float) -> Tensor:
    """How far off values / factor are in float16, at most, times the factor. float64 [R, C]."""
    return values_RC.double().abs() * 2.0**-11 + factor * 2.0**-25
