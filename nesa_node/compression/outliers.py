"""Outlier channels: the few channels that are much larger than the rest for every token.

Within a block they would set a scale at which the rest is lost. Two codecs keep them in float16:
the lower byte takes the place of the channel's code, the upper byte is stored separately.

Legend: R rows (tokens), D channels, C outlier channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nesa_node.compression.codec import part_of
from nesa_node.core.errors import ProtocolError

_SAMPLE = 64
"""Tokens sampled to find the channels with the largest mean |value|."""
_PEAK = 1 / 32
"""Weight of a channel's largest |value| relative to its mean |value|."""


def largest_channels(values_RD: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest channels of float32 values, int64 [C], ascending.

    These outliers are much larger than the rest for every token; within a block they would set a
    scale at which the rest is lost. Only the sender chooses: the indices are part of the payload.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values_RD.device)
    size_RD = values_RD.abs()
    some_RD = size_RD[:: max(1, len(size_RD) // _SAMPLE)]
    score_D = some_RD.mean(0) + size_RD.amax(0) * _PEAK
    return score_D.topk(count).indices.sort().values


def list_dtype(width: int) -> torch.dtype:
    """Integer type of the channel list; 16-bit entries are read as unsigned."""
    return torch.int16 if width <= 2**16 else torch.int32


def read_list(data: memoryview, start: int, count: int, width: int) -> Tensor:
    """The list of `count` >= 1 channels, int64 [C], on the CPU.

    Raises `ProtocolError` unless they are ascending and below D.
    """
    channels_C = part_of(data, start, count, list_dtype(width)).long()
    if width <= 2**16:
        channels_C &= 0xFFFF
    first, last = channels_C[0].item(), channels_C[-1].item()
    rising = bool((channels_C[1:] > channels_C[:-1]).all())
    if not rising or first < 0 or last >= width:
        raise ProtocolError("bad_tensor", "the outlier channels are out of order or of range")
    return channels_C


def without(values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """`values_RD` with `channels_C` set to zero; a copy, unless there are none."""
    return values_RD.index_fill(1, channels_C, 0) if len(channels_C) else values_RD


def bytes_of(values_RC: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The lower and the upper bytes of values / factor in float16, each uint8 [R, C].

    The lower byte takes the place of the channel's code, the upper byte is stored separately.
    """
    parts_RC2 = (values_RC / factor).half().contiguous().unsqueeze(-1).view(torch.uint8)
    return parts_RC2[..., 0], parts_RC2[..., 1]


def of_bytes(lower_RC: Tensor, upper_RC: Tensor, factor: float) -> Tensor:
    """The inverse of `bytes_of`, float32 [R, C]."""
    parts_RC2 = torch.stack((lower_RC, upper_RC), -1)
    return parts_RC2.view(torch.float16)[..., 0].float() * factor


def half_bound(values_RC: Tensor, factor: float) -> Tensor:
    """Upper bound on the error of values stored as value / factor in float16, float64 [R, C]."""
    return values_RC.double().abs() * 2.0**-11 + factor * 2.0**-25
