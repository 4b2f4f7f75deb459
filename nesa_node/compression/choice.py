"""Which codec gets hidden states through a link soonest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORTH_IT = 0.9
"""Something else than the plainest has to take less than this of its time: rates are estimates."""
FAST_BYTES_PER_S = 50e6
"""Nobody waits for a link like this: it carries more than machines compute."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a codec takes on this machine, encoding and decoding together."""

    fixed_s: float
    per_byte_s: float
    """Of the bytes of the tensor itself."""
    ratio: float
    """Bytes of the encoding per byte of the tensor."""

    def seconds(self, nbytes: int, rate_bytes_per_s: float) -> float:
        """Until a tensor of so many bytes is at the other end of a link, but for its latency."""
        return self.fixed_s + nbytes * (self.per_byte_s + self.ratio / rate_bytes_per_s)


PLAIN_COST = Cost(0.0, 0.0, 1.0)


def fastest(
    candidates: Sequence[str], nbytes: int, rate_bytes_per_s: float, costs: Mapping[str, Cost]
) -> str:
    """The one that gets a tensor of `nbytes` there soonest.

    `candidates`: the plainest first, which the others have to beat clearly.
    """

    if rate_bytes_per_s >= FAST_BYTES_PER_S:
        return candidates[0]

    def seconds(codec: str) -> float:
        return costs[codec].seconds(nbytes, rate_bytes_per_s)

    best = min(candidates, key=seconds)
    return best if seconds(best) < WORTH_IT * seconds(candidates[0]) else candidates[0]
