"""Speeds of spans that no machine has run yet, from what its device was measured to do.

The roofline model (Williams, Waterman, Patterson 2009): a block takes as long as its arithmetic or
its memory traffic, whichever is longer, and as its overhead (launches, norms, attention over a
short cache). On a CPU the overhead comes first or last; a GPU computes while the CPU launches, so
that the longer of both counts. A decode step reads every weight once; a prefill computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFigures:
    """What a device was measured to do with blocks whose weights are of one kind.

    `block_overhead_s` is the part of a block's time that does not depend on its size, which passes
    during the computation if `overlaps`; `read_bytes_per_s` is the rate at which decode steps read
    weights, `flop_per_s` the arithmetic of prefills.
    """

    block_overhead_s: float
    read_bytes_per_s: float
    flop_per_s: float
    overlaps: bool = False

    def slowed(self, factor: float) -> WeightFigures:
        """Figures of a device on which everything takes `factor` times as long."""
        return WeightFigures(
            factor * self.block_overhead_s,
            self.read_bytes_per_s / factor,
            self.flop_per_s / factor,
            self.overlaps,
        )

    def block_s(self, work: BlockWork, tokens: int) -> float:
        """Seconds that `tokens` tokens of one sequence take through a block."""
        busy_s = max(work.read_bytes / self.read_bytes_per_s, tokens * work.flop / self.flop_per_s)
        if self.overlaps:
            return max(busy_s, self.block_overhead_s)
        return busy_s + self.block_overhead_s


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What one token asks of one block: bytes of weights that it reads, and operations.

    For a mixture of experts, of the experts that one token uses.
    """

    read_bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class PredictedSpeed:
    """Tokens per second of one sequence through a span, without network."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float


def predict_speed(
    blocks: Sequence[BlockWork], figures: WeightFigures, chunk_tokens: int = 128
) -> PredictedSpeed:
    """Speeds through `blocks`; a prefill runs in chunks of `chunk_tokens`."""
    decode_s = sum(figures.block_s(work, 1) for work in blocks)
    prefill_s = sum(figures.block_s(work, chunk_tokens) for work in blocks)
    return PredictedSpeed(1 / decode_s, chunk_tokens / prefill_s)
