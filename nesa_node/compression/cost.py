"""Encoding and decoding times of codecs, as measured on this device.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nesa_node.compression import tensors

_RUNS = 5
_LONG_NBYTES = 1 << 20
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Seconds per message, and per byte of its unencoded values."""

    encode_message_s: float
    encode_s_per_byte: float
    decode_message_s: float
    decode_s_per_byte: float

    def seconds(self, nbytes: int) -> float:
        """Seconds to encode and decode a message, if sender and receiver are equally fast."""
        fixed_s = self.encode_message_s + self.decode_message_s
        return fixed_s + nbytes * (self.encode_s_per_byte + self.decode_s_per_byte)


def measure_cost(
    codec: str,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    clock: Callable[[], float] = time.perf_counter,
) -> CodecCost:
    """Time messages of one token and of 1 MiB: the best of five runs each, after a warm-up run.

    Blocks for milliseconds; `blockwise8` takes seconds the first time (its import). The values are
    Gaussian with one huge channel, equal in every call. Raises `ProtocolError` as `encode`.
    """
    generator = torch.Generator().manual_seed(0)
    row_nbytes = hidden_size * dtype.itemsize
    many = max(2, _LONG_NBYTES // row_nbytes)
    hidden_TD = torch.randn(many, hidden_size, generator=generator)
    hidden_TD[:, 0] *= 1000
    hidden_TD = hidden_TD.to(device, dtype)
    one_s = _best(hidden_TD[:1], codec, clock)
    many_s = _best(hidden_TD, codec, clock)
    encode_s, decode_s = (
        max(0.0, (long_s - short_s) / ((many - 1) * row_nbytes))
        for short_s, long_s in zip(one_s, many_s, strict=True)
    )
    return CodecCost(
        encode_message_s=max(0.0, one_s[0] - encode_s * row_nbytes),
        encode_s_per_byte=encode_s,
        decode_message_s=max(0.0, one_s[1] - decode_s * row_nbytes),
        decode_s_per_byte=decode_s,
    )


def _best(hidden_TD: torch.Tensor, codec: str, clock: Callable[[], float]) -> tuple[float, float]:
    """Least seconds to encode and to decode `hidden_TD`."""
    encode_s, decode_s = [], []
    for _ in range(_RUNS + 1):
        started = clock()
        meta, payload = tensors.encode(hidden_TD, codec=codec)
        encoded = clock()
        received = bytearray(payload)
        copied = clock()
        tensors.decode(meta, received, max_bytes=2 * hidden_TD.nbytes + 64, device=hidden_TD.device)
        encode_s.append(encoded - started)
        decode_s.append(clock() - copied)
    return min(encode_s[1:]), min(decode_s[1:])
