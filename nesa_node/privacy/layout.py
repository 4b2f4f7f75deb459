"""Where the numbers of a product y = W x lie in slots.

Rows of W are read in pairs, as real and imaginary part of complex rows, and R of them, a power of
two, are a block: one ciphertext of outputs. Slots are P = S / R segments of R. A chunk of x,
n columns (a power of two), gives each segment a share of w = n / P columns, repeated to fill it;
row r of segment p then takes the w slots from p R + r on. Where they reach into the next segment,
they miss as many columns of their own share as the segment before takes of it, so that over all
segments each column is taken once. The client adds the segments' parts (Halevi and Shoup's
diagonals, 2014, section 4.3, of matrices that are not square).

O outputs, I inputs, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.complex128]


@dataclass(frozen=True, slots=True)
class ProductLayout:
    """Layout of products [O, I] @ [I]: of `chunks` columns each, in `blocks` of complex rows each.

    Blocks are equal, unless all chunks have as many columns as there are slots.
    """

    inputs: int
    outputs: int
    slots: int
    chunks: tuple[int, ...]
    blocks: tuple[int, ...]

    def diagonals(self, chunk: int, block: int) -> int:
        """Rotations of a chunk's ciphertext that a block is made of."""
        return max(self.chunks[chunk] * self.blocks[block] // self.slots, 1)

    def nbytes(self, primes: int) -> int:
        """Bytes of the encoded weights."""
        pairs = product(range(len(self.chunks)), range(len(self.blocks)))
        return sum(self.diagonals(*pair) for pair in pairs) * primes * 8 * self.slots

    def most_diagonals(self, chunk: int) -> int:
        return max(self.diagonals(chunk, block) for block in range(len(self.blocks)))

    def columns(self, chunk: int) -> npt.NDArray[np.int64]:
        """Column of x in each slot [S] of a chunk; -1: none."""
        width, first = self.diagonals(chunk, 0), sum(self.chunks[:chunk])
        segment, place = np.divmod(np.arange(self.slots), self.blocks[0])
        column = segment * width + place % width
        column_S = np.where(column < self.chunks[chunk], first + column, -1)
        return np.where(column_S < self.inputs, column_S, -1)

    def pack(self, x_I: npt.NDArray[np.float64]) -> list[Slots]:
        """Slots of each chunk."""
        padded = np.append(x_I, 0.0)
        return [padded[self.columns(index)].astype(complex) for index in range(len(self.chunks))]

    def diagonal_slots(
        self, weight_OI: npt.NDArray[np.float64], chunk: int, block: int, step: int
    ) -> Iterator[Slots]:
        """What a chunk's rotations by 0, 1, ... are multiplied with: [`step`, S] at a time."""
        rows, first = self.blocks[block], 2 * sum(self.blocks[:block])
        padded = np.zeros((2 * rows, self.inputs + 1))
        taken = weight_OI[first : first + 2 * rows]
        padded[: len(taken), : self.inputs] = taken
        place_S, columns_S = np.arange(self.slots), self.columns(chunk)
        count = self.diagonals(chunk, block)
        for start in range(0, count, step):
            rotations = np.arange(start, min(start + step, count))[:, None]
            columns = columns_S[(place_S + rotations) % self.slots]
            upper, lower = (padded[half + place_S % rows, columns] for half in (0, rows))
            yield upper + 1j * lower

    def unpack(self, blocks: Sequence[Slots]) -> npt.NDArray[np.float64]:
        """Outputs [O] of the slots of all blocks."""
        parts = []
        for rows, slots in zip(self.blocks, blocks, strict=True):
            sums = slots.reshape(-1, rows).sum(0)
            parts += [sums.real, sums.imag]
        return np.concatenate(parts)[: self.outputs]


BLOCK_COST, CHUNK_COST = 300, 100
"""What a ciphertext of outputs (53 KB) or inputs (40 KB) costs beside its diagonals, in diagonals,
which take time and memory, 64 KB each."""


def plan_layout(outputs: int, inputs: int, slots: int) -> ProductLayout:
    """The layout with the least time of diagonals and messages."""
    pairs = -(-outputs // 2)
    layouts = []
    for chunks in _parts(inputs, slots):
        mixed = _parts(pairs, slots) if set(chunks) == {slots} else []
        equal = [(rows,) * -(-pairs // rows) for rows in _powers_of_two(slots)]
        layouts += [
            ProductLayout(inputs, outputs, slots, chunks, blocks) for blocks in [*mixed, *equal]
        ]
    return min(layouts, key=_cost)


def _cost(layout: ProductLayout) -> float:
    pairs = product(range(len(layout.chunks)), range(len(layout.blocks)))
    diagonals = sum(layout.diagonals(chunk, block) for chunk, block in pairs)
    return diagonals + len(layout.blocks) * BLOCK_COST + len(layout.chunks) * CHUNK_COST


def _parts(count: int, most: int) -> list[tuple[int, ...]]:
    """Powers of two, none above `most`, that hold `count`: the last one is rounded up."""
    found: list[tuple[int, ...]] = []
    parts: list[int] = []
    left = count
    while left:
        rounded = 1 << (left - 1).bit_length()
        if rounded <= most:
            found.append((*parts, rounded))
        parts.append(min(1 << (left.bit_length() - 1), most))
        left -= parts[-1]
    return [*found, tuple(parts)]


def _powers_of_two(most: int) -> list[int]:
    return [1 << bits for bits in range(most.bit_length())]
