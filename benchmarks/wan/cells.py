"""The cells of the table, and the time below which physics lets no step come in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.emulator.links import Link
from benchmarks.options import Options


@dataclass(frozen=True, slots=True)
class Codec:
    """How hidden states travel."""

    bits_per_value: float | None = None
    """None: as many as the model's dtype has."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What `from_pretrained` is told for it."""


CODECS: Mapping[str, Codec] = {
    "none": Codec(),
    "lossless": Codec(arguments={"quality": "lossless"}),
    "bfloat16": Codec(16, {"quality": "bfloat16"}),
    "blockwise8": Codec(8.6, {"quality": "blockwise8"}),
    "int8": Codec(8.6, {"quality": "int8"}),
    "int4": Codec(5.6, {"quality": "int4"}),
    "high": Codec(8.6, {"quality": "high"}),
    "balanced": Codec(5.6, {"quality": "balanced"}),
}
"""The last two are floors, above which each link chooses: the bound is that of their smallest."""


@dataclass(frozen=True, slots=True)
class Cell:
    round_trip_ms: int
    """Between any two machines, the client's included."""
    bandwidth_mbit_per_s: int
    """Of each direction of each pair."""
    batch: int
    """Rows of the session."""
    codec: str

    @property
    def link(self) -> Link:
        return Link(
            latency_ms=self.round_trip_ms / 2, bandwidth_mbit_per_s=self.bandwidth_mbit_per_s
        )


def grid(options: Options) -> list[Cell]:
    """Cells that share a link follow each other."""
    return [
        Cell(round_trip_ms, bandwidth, batch, codec)
        for round_trip_ms, bandwidth, batch, codec in product(
            options.round_trips_ms, options.bandwidths_mbit, options.batches, options.codecs
        )
    ]


@dataclass(frozen=True, slots=True)
class Chain:
    """What a step has to pass through."""

    nodes: int
    hidden_size: int
    value_bits: int
    """Of the dtype that is computed in."""

    @property
    def legs(self) -> int:
        """From the client to the first node, from each to the next, and from the last back."""
        return self.nodes + 1

    def leg_bytes(self, cell: Cell) -> float:
        """One token's hidden state of every row, as the codec has it, with nothing around it."""
        bits = CODECS[cell.codec].bits_per_value or self.value_bits
        return cell.batch * self.hidden_size * bits / 8

    def bound_s(self, cell: Cell, compute_s: float) -> float:
        """Compute, the one-way latencies along the chain, and bytes over bandwidth on each leg.

        It is that of a step which travels whole: only rows that travelled one after another could
        have a leg's transfer and the next node's work at the same time.
        """
        latency_s = self.legs * cell.round_trip_ms / 2000
        transfer_s = self.legs * self.leg_bytes(cell) / (cell.bandwidth_mbit_per_s * 125_000)
        return compute_s + latency_s + transfer_s
