"""Encoding and decoding times of codecs, and the choice of the fastest one for a link.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nesa_node.compression import tensors
from nesa_node.core.arrays import Floats

_TIMED_RUNS = 5
_LONG_MESSAGE_BYTES = 1 << 20
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


def measure_codec_cost(
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
    many = max(2, _LONG_MESSAGE_BYTES // row_nbytes)
    hidden_TD = torch.randn(many, hidden_size, generator=generator)
    hidden_TD[:, 0] *= 1000
    hidden_TD = hidden_TD.to(device, dtype)
    one_s = _best_times_s(hidden_TD[:1], codec, clock)
    many_s = _best_times_s(hidden_TD, codec, clock)
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


def _best_times_s(
    hidden_TD: torch.Tensor, codec: str, clock: Callable[[], float]
) -> tuple[float, float]:
    """Least seconds to encode and to decode `hidden_TD`."""
    encode_s, decode_s = [], []
    for _ in range(_TIMED_RUNS + 1):
        started = clock()
        meta, payload = tensors.encode(hidden_TD, codec=codec)
        encoded = clock()
        received = bytearray(payload)
        copied = clock()
        tensors.decode(meta, received, max_bytes=2 * hidden_TD.nbytes + 64, device=hidden_TD.device)
        encode_s.append(encoded - started)
        decode_s.append(clock() - copied)
    return min(encode_s[1:]), min(decode_s[1:])


MAX_TIME_RATIO = 0.9
"""A codec is chosen over the plainest only below this share of its time: rates are estimates."""
UNCOMPRESSED_BYTES_PER_S = 50e6
"""Links of at least this rate get the plainest codec: compute is the bottleneck there."""


@dataclass(frozen=True, slots=True)
class CodecLinkCost:
    """Costs of a codec on this machine, encoding and decoding together."""

    fixed_s: float
    per_byte_s: float
    """Seconds per byte of the unencoded tensor."""
    ratio: float
    """Bytes of the encoding per byte of the tensor."""

    def seconds(self, nbytes: int, rate_bytes_per_s: float) -> float:
        """Seconds to encode, transmit and decode a tensor of `nbytes`, without link latency."""
        return self.fixed_s + nbytes * (self.per_byte_s + self.ratio / rate_bytes_per_s)


PLAIN_COST = CodecLinkCost(0.0, 0.0, 1.0)


def fastest_codec(
    candidates: Sequence[str],
    nbytes: int,
    rate_bytes_per_s: float,
    costs: Mapping[str, CodecLinkCost],
) -> str:
    """The codec with the shortest transfer of a tensor of `nbytes`.

    `candidates`: the plainest first; any other must be faster by `MAX_TIME_RATIO`.
    """

    if rate_bytes_per_s >= UNCOMPRESSED_BYTES_PER_S:
        return candidates[0]

    def seconds(codec: str) -> float:
        return costs[codec].seconds(nbytes, rate_bytes_per_s)

    best = min(candidates, key=seconds)
    return best if seconds(best) < MAX_TIME_RATIO * seconds(candidates[0]) else candidates[0]


def fastest_seconds(
    costs: Sequence[CodecLinkCost], nbytes: float, rate_bytes_per_s: Floats
) -> Floats:
    """Seconds of a tensor of `nbytes` in the codec that `fastest_codec` chooses at each rate.

    `costs`: of the candidates, the plainest first. An array like `rate_bytes_per_s`.
    """
    plain_s, *other_s = (
        each.fixed_s + nbytes * (each.per_byte_s + each.ratio / rate_bytes_per_s) for each in costs
    )
    if not other_s:
        return plain_s
    best_s = np.minimum.reduce(other_s)
    is_chosen = (rate_bytes_per_s < UNCOMPRESSED_BYTES_PER_S) & (best_s < MAX_TIME_RATIO * plain_s)
    return np.where(is_chosen, best_s, plain_s)
