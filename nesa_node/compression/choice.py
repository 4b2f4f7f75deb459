"""Choice of the codec with the shortest transfer time on a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORTH_IT = 0.9
"""A codec is chosen over the plainest only below this share of its time: rates are estimates."""
FAST_BYTES_PER_S = 50e6
"""Links of at least this rate get the plainest codec: compute is the bottleneck there."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of a codec on this machine, encoding and decoding together."""

    fixed_s: float
    per_byte_s: float
    """Seconds per byte of the unencoded tensor."""
    ratio: float
    """Bytes of the encoding per byte of the tensor."""

    def seconds(self, nbytes: int, rate_bytes_per_s: float) -> float:
        """Seconds to encode, transmit and decode a tensor of `nbytes`, without link latency."""
        return self.fixed_s + nbytes * (self.per_byte_s + self.ratio / rate_bytes_per_s)


PLAIN_COST = Cost(0.0, 0.0, 1.0)


def fastest(
    candidates: Sequence[str], nbytes: int, rate_bytes_per_s: float, costs: Mapping[str, Cost]
) -> str:
    """The codec with the shortest transfer of a tensor of `nbytes`.

    `candidates`: the plainest first; any other must be faster by `WORTH_IT`.
    """

    if rate_bytes_per_s >= FAST_BYTES_PER_S:
        return candidates[0]

    def seconds(codec: str) -> float:
        return costs[codec].seconds(nbytes, rate_bytes_per_s)

    best = min(candidates, key=seconds)
    return best if seconds(best) < WORTH_IT * seconds(candidates[0]) else candidates[0]
