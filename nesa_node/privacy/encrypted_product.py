"""The node's half of CKKS: products of its weights with vectors that it cannot read.

y = W x is the sum of W's diagonals times rotations of x. With steps of B, rotations by d = g B + b
are those by b (hoisted: the digits of x are made once, and kept modulo all primes), and one by g B
of a sum over b. Diagonals are rolled back by g B when they are encoded.

P primes, N degree, D digits, B rotations from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.layout import ProductLayout, Slots
from nesa_node.privacy.parameters import INPUT_SCALE, RingParameters
from nesa_node.privacy.ring import Residues, Ring, to_tiles
from nesa_node.privacy.slots import coefficients_of

STEPS = 32
"""B: more make more keys, fewer more rotations of sums."""
_RESULT_BITS = 50
"""Bits of a result modulo two primes, of 52: the rest holds signs and errors."""


@dataclass(frozen=True, slots=True)
class EncodedMatrix:
    """Diagonals of a matrix as polynomials, to be multiplied with encrypted vectors."""

    layout: ProductLayout
    diagonals: tuple[tuple[Residues, ...], ...]
    """Values [tiles, diagonals, T] of each block, chunk by chunk."""
    scale: float
    """Of the product: what a slot of 1 is in its coefficients."""


def required_rotations(layouts: Sequence[ProductLayout]) -> list[int]:
    """Steps of all rotations that products of these layouts make."""
    most = [each.most_diagonals(chunk) for each in layouts for chunk in range(len(each.chunks))]
    small = {step for count in most for step in range(1, min(count, STEPS))}
    large = {step for count in most for step in range(STEPS, count, STEPS)}
    return sorted(small | large)


def largest_weight_scale(parameters: RingParameters) -> float:
    """Scale at which a weight of 1 alone would fill a result."""
    return 2.0**_RESULT_BITS * parameters.primes[2] / INPUT_SCALE


def encode_matrix(
    ring: Ring,
    layout: ProductLayout,
    weight_OI: npt.NDArray[np.float64],
    keep: Callable[[Residues], Residues] = lambda values: values,
) -> EncodedMatrix:
    """Encode W for vectors of at most 1 in size.

    `keep` returns each part as it is to be held. Raises `ValueError` for weights that are not
    finite, or too large for results to be exact.
    """
    if not np.isfinite(weight_OI).all():
        raise ValueError("weights must be finite")
    # No output of a complex row is larger than both of its rows' sums.
    largest = 2 * float(np.abs(weight_OI).sum(1).max())
    limit = largest_weight_scale(ring.parameters)
    scale = 2.0 ** np.floor(np.log2(limit / (largest or 1.0)))
    if scale * float(np.abs(weight_OI).max()) > 2.0**60 or scale < 2.0**10:
        raise ValueError(f"weights whose rows sum up to {largest:.3g} cannot be encoded")

    def encode(chunk: int, block: int) -> Residues:
        groups = layout.diagonal_slots(weight_OI, chunk, block, STEPS)
        return keep(_encode_part(ring, groups, float(scale)))

    diagonals = tuple(
        tuple(encode(chunk, block) for chunk in range(len(layout.chunks)))
        for block in range(len(layout.blocks))
    )
    return EncodedMatrix(layout, diagonals, float(scale) * INPUT_SCALE / ring.primes[2])


def _encode_part(ring: Ring, groups: Iterable[Slots], scale: float) -> Residues:
    """Values [tiles, diagonals, T] of the slots of groups of `STEPS` diagonals."""
    parts = []
    for number, slots in enumerate(groups):
        rolled = np.roll(slots, number * STEPS, axis=1)
        residues = ring.residues(coefficients_of(rolled, scale), len(ring.primes))
        parts.append(to_tiles(ring.values(residues).reshape(len(slots), -1)))
    return np.concatenate(parts, axis=1)


def multiply(
    ring: Ring,
    matrix: EncodedMatrix,
    chunks: Sequence[Residues],
    keys: Mapping[int, Residues],
) -> list[Residues]:
    """Coefficients [2, 2, N] of each block of W x, of the ciphertexts [2, P - 1, N] of x's chunks.

    `keys` are those of `required_rotations`.
    """
    layout = matrix.layout
    rotated = [
        ring.hoisted_rotations(
            each,
            keys,
            min(layout.most_diagonals(index), STEPS),
        )
        for index, each in enumerate(chunks)
    ]
    return [_multiply_block(ring, block, rotated, keys) for block in matrix.diagonals]


def _multiply_block(
    ring: Ring,
    parts: Sequence[Residues],
    rotated: Sequence[Residues],
    keys: Mapping[int, Residues],
) -> Residues:
    groups = [-(-part.shape[1] // STEPS) for part in parts]
    sums = np.zeros((max(groups), 2, len(ring.primes), ring.degree), np.uint32)
    for part, vectors, count in zip(parts, rotated, groups, strict=True):
        ring.multiply_sum(part, vectors, sums[:count])
    total = sums[0]
    for group in range(1, len(sums)):
        ring.add_rotated(total, sums[group], group * STEPS, keys[group * STEPS])
    return ring.divide_by_last(ring.divide_by_last(ring.coefficients(total)))
