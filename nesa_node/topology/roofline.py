"""Speeds of spans that no machine has run yet, from what its device was measured to do.

The roofline model (Williams, Waterman, Patterson 2009): a block takes as long as its arithmetic or
its memory traffic, whichever is longer, and as its overhead (launches, norms, attention over a
short cache). On a CPU the overhead comes first or last; a GPU computes while the CPU launches, so
that the longer of both counts. A decode step reads every weight once; a prefill computes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFigures:
    """What a device was measured to do with blocks whose weights are of one kind.

    `block_overhead_s` is the part of a block's time that does not depend on its size, which passes
    during the computation if `overlaps`; `read_bytes_per_s` is the rate at which decode steps read
    weights, `flop_per_s` the arithmetic of prefills. `wakeup_s` is what a decode step takes longer
    after a pause, as in a chain, where a device waits for its turn: its threads have gone to sleep,
    and its caches hold other data.
    """

    block_overhead_s: float
    read_bytes_per_s: float
    flop_per_s: float
    overlaps: bool = False
    wakeup_s: float = 0.0

    def slowed(self, factor: float) -> WeightFigures:
        """Figures of a device on which everything takes `factor` times as long."""
        return WeightFigures(
            factor * self.block_overhead_s,
            self.read_bytes_per_s / factor,
            self.flop_per_s / factor,
            self.overlaps,
            factor * self.wakeup_s,
        )

    def slower(self, other: WeightFigures) -> WeightFigures:
        """The slower of each figure, of two measurements of one device."""
        return WeightFigures(
            max(self.block_overhead_s, other.block_overhead_s),
            min(self.read_bytes_per_s, other.read_bytes_per_s),
            min(self.flop_per_s, other.flop_per_s),
            self.overlaps,
            max(self.wakeup_s, other.wakeup_s),
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


PACKED_BYTES = 11
MAX_FIGURE = 1e18
"""Largest rate, and number of bytes and operations of a block, in what peers send."""
MAX_OVERHEAD_S = 1e3


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a node's device does with weights of its kind, and what a block of its model asks of it.

    Blocks count as equal: `work` is that of a mean one. So what was measured through one span says
    the same of another as a roofline that is corrected by it: the ratio of their blocks.
    """

    figures: WeightFigures
    work: BlockWork

    def predict(self, num_blocks: int) -> PredictedSpeed:
        """Speeds through `num_blocks` blocks, at least 1, before anything is measured."""
        return predict_speed([self.work] * num_blocks, self.figures)


def pack_roofline(roofline: Roofline | None) -> bytes:
    """Pack for a record, 11 bytes: five numbers as bfloat16 (0.4 % off at most), and `overlaps`.

    None is empty. Raises `ValueError` as `unpack_roofline`.
    """
    if roofline is None:
        return b""
    figures, work = roofline.figures, roofline.work
    values = (
        *(figures.block_overhead_s, figures.read_bytes_per_s, figures.flop_per_s),
        *(work.read_bytes, work.flop),
    )
    # bfloat16 is the upper half of float32; half a unit in its last place rounds to the nearest.
    halves = (((struct.unpack(">I", struct.pack(">f", each))[0] + 0x8000) >> 16) for each in values)
    packed = struct.pack(">5H?", *halves, figures.overlaps)
    unpack_roofline(packed)
    return packed


def unpack_roofline(packed: bytes) -> Roofline | None:
    """The reverse. Raises `ValueError` for other sizes, and numbers that are no rates or times."""
    if not packed:
        return None
    if len(packed) != PACKED_BYTES or packed[-1] > 1:
        raise ValueError(f"figures have {PACKED_BYTES} bytes, the last 0 or 1, or none")
    overhead_s, *rates = (
        struct.unpack(">f", packed[at : at + 2] + b"\0\0")[0] for at in range(0, 10, 2)
    )
    if not (0 <= overhead_s <= MAX_OVERHEAD_S and all(0 < each <= MAX_FIGURE for each in rates)):
        raise ValueError("figures must be positive and finite")
    read_bytes_per_s, flop_per_s, read_bytes, flop = rates
    figures = WeightFigures(overhead_s, read_bytes_per_s, flop_per_s, bool(packed[-1]))
    return Roofline(figures, BlockWork(read_bytes, flop))
