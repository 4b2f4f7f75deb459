"""Products of integer weights with vectors that a one-time mask hides.

A client that wants W x sends x - r, for a mask r that it uses once, and adds W r to the answer:
all are numbers modulo 2^40, of which each x - r is as likely as any other. W r it gets beforehand:
it sends r encrypted, and the node multiplies. There W is a polynomial: weights [o, j] of a block of
R rows and a chunk of n inputs are coefficients o n + n - 1 - j, r is sum of r_j X^j, and the
product has (W r)_o as coefficient o n + n - 1. No rotations are needed, and so no keys.

Numbers are encrypted exactly (BFV): r as q r / t, rounded, for the modulus q and t = 2^40. The
noise of a product is that of r times weights: at most sqrt(R) 2^18 3.3 for R up to 4,096, or, of
wide layers, whose blocks have 128 rows at most, sqrt(R) 2^20 3.3. Twelve standard deviations of it
are below 2^30, of 2^37 that there are (q / 2 t); divided by the last prime, below 2^8 of 2^11.

T tokens, O outputs, I inputs, N degree, P primes, B blocks, C chunks, R rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nesa_node.engine.kernels.linear import FastLinear, make_linear
from nesa_node.engine.kernels.machine_code import copy_to_huge_pages
from nesa_node.privacy.packing import pack_residues, packed_bytes, unpack_residues
from nesa_node.privacy.ring import TILE, Residues, Ring, to_tiles

MASK_BITS = 40
"""Of a masked number, and of a product: that of `weight_bits` and `input_bits`, and a sign."""
MOST_NARROW_INPUTS = 4096
"""Of layers whose weights have 18 bits; those of wider ones would be too coarse."""
PRIMES = 3
"""Of encrypted masks; products are divided by the last one."""
_MASK = np.uint64((1 << MASK_BITS) - 1)
_MASKED_BYTES = MASK_BITS // 8
_EXACT_BITS = 24
"""Of integers that 32-bit floats, and all sums that stay below, hold exactly."""
_SMALLEST = 1e-280
"""Of what is told from zero: scales do not underflow."""
_MOST_CHUNKS = 128
_SPARE = 1.06
"""Of the polynomials of a layout, by the fewest that there could be: they take memory."""

Integers = npt.NDArray[np.int64]
Masked = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """Layout of products [O, I] @ [I]: chunks of `width` inputs, blocks of `rows` outputs."""

    inputs: int
    outputs: int
    width: int
    rows: int

    @property
    def chunks(self) -> int:
        return -(-self.inputs // self.width)

    @property
    def blocks(self) -> int:
        return -(-self.outputs // self.rows)

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """The coefficients [R] of a block's product that are outputs."""
        return np.arange(1, self.rows + 1) * self.width - 1

    def nbytes(self, degree: int) -> int:
        """Bytes of the encoded weights, and of the integers themselves."""
        return 4 * PRIMES * degree * self.chunks * self.blocks + self.integer_bytes

    @property
    def integer_bytes(self) -> int:
        """Bytes of the integers, as 32-bit floats."""
        return 4 * self.inputs * self.outputs

    def split(self, numbers_I: Masked, degree: int) -> Masked:
        """Polynomials [C, N] of each chunk."""
        polynomials_CN = np.zeros((self.chunks, degree), np.uint64)
        padded = np.zeros(self.chunks * self.width, np.uint64)
        padded[: self.inputs] = numbers_I
        polynomials_CN[:, : self.width] = padded.reshape(self.chunks, self.width)
        return polynomials_CN


def weight_bits(inputs: int) -> int:
    """Bits of the largest sum of sizes in a row of integer weights."""
    return 18 if inputs <= MOST_NARROW_INPUTS else 20


def input_bits(inputs: int) -> int:
    """Bits of an integer input, beside its sign."""
    return MASK_BITS - 1 - weight_bits(inputs)


def plan_mask_layout(outputs: int, inputs: int, degree: int) -> MaskLayout:
    """The layout with the smallest messages, of those whose weights take little more memory than
    they must.
    """
    layouts = []
    for chunks in range(-(-inputs // degree), min(inputs, _MOST_CHUNKS) + 1):
        width = -(-inputs // chunks)
        layouts.append(MaskLayout(inputs, outputs, width, min(degree // width, outputs)))
    fewest = min(each.chunks * each.blocks for each in layouts)
    small = [each for each in layouts if each.chunks * each.blocks <= max(_SPARE * fewest, 2)]
    # A chunk has one polynomial modulo three primes, a block one modulo two, and few numbers.
    return min(small, key=lambda each: 3 * each.chunks + 2 * each.blocks)


def quantize_rows(
    weight_OI: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Integers [O, I] whose sizes in a row sum up to `weight_bits` at most, and rows' scales [O].

    Scales are powers of two: every machine gets the same integers. Raises `ValueError` for weights
    that are not finite.
    """
    sums_O = np.abs(weight_OI).sum(1)
    if not np.isfinite(sums_O).all():
        raise ValueError("weights must be finite")
    inputs = weight_OI.shape[1]
    most = (1 << weight_bits(inputs)) - inputs / 2  # what rounding may add is left out
    _, exponents_O = np.frexp(np.where(sums_O > _SMALLEST, sums_O, 1.0) / most)
    scales_O = np.ldexp(1.0, exponents_O)
    return np.rint(weight_OI / scales_O[:, None]).astype(np.float32), scales_O


def quantize_inputs(x_TI: npt.NDArray[np.float64]) -> tuple[Integers, npt.NDArray[np.float64]]:
    """Integers [T, I] of `input_bits`, and the scale [T] of each token."""
    largest_T = np.abs(x_TI).max(1)
    most = (1 << input_bits(x_TI.shape[1])) - 1
    scales_T = np.where(largest_T > _SMALLEST, largest_T, 1.0) / most
    return np.rint(x_TI / scales_T[:, None]).astype(np.int64), scales_T


def encode_integers(
    ring: Ring, layout: MaskLayout, integers_OI: npt.NDArray[np.float32]
) -> Residues:
    """Values [tiles, B C, T] of the weights' polynomials modulo the first three primes."""
    blocks, chunks, rows, width = layout.blocks, layout.chunks, layout.rows, layout.width
    parts = []
    for block in range(blocks):
        taken = integers_OI[block * rows : (block + 1) * rows]
        padded = np.zeros((rows, chunks * width), np.int64)
        padded[: len(taken), : layout.inputs] = taken
        polynomials = np.zeros((chunks, ring.degree), np.int64)
        reversed_CRn = padded.reshape(rows, chunks, width)[..., ::-1].transpose(1, 0, 2)
        polynomials[:, : rows * width] = reversed_CRn.reshape(chunks, -1)
        values = ring.values(ring.residues(polynomials, PRIMES))
        parts.append(to_tiles(values.reshape(chunks, -1)))
    return np.concatenate(parts, axis=1)


def multiply_encrypted_mask(
    ring: Ring, layout: MaskLayout, encoded: Residues, ciphertexts_C2PN: Residues
) -> tuple[Residues, Residues]:
    """Of a mask's encrypted chunks the product with encoded weights: of each block the outputs'
    coefficients [B, 2, R] of the first polynomial, and the second polynomial [B, 2, N], both modulo
    the first two primes.
    """
    chunks = len(ciphertexts_C2PN)
    vectors = to_tiles(ciphertexts_C2PN.reshape(2 * chunks, -1)).reshape(-1, chunks, 2, TILE)
    sums = np.zeros((layout.blocks, 2, PRIMES, ring.degree), np.uint32)
    ring.multiply_sum(encoded, vectors, sums)
    products = ring.divide_by_last(ring.coefficients(sums))
    return products[:, 0][..., layout.places], products[:, 1]


def mask_product_bytes(ring: Ring, layout: MaskLayout) -> int:
    """Bytes of what `multiply_encrypted_mask` makes, packed."""
    outputs = packed_bytes(ring, PRIMES - 1, _packed_outputs(layout))
    return layout.blocks * packed_bytes(ring, PRIMES - 1) + outputs


def pack_mask_product(ring: Ring, first_B2R: Residues, second_B2N: Residues) -> bytes:
    outputs = first_B2R.transpose(1, 0, 2).reshape(PRIMES - 1, -1)
    padded = np.pad(outputs, ((0, 0), (0, -outputs.shape[1] % 8)))
    return pack_residues(ring, second_B2N) + pack_residues(ring, padded)


def unpack_mask_product(
    ring: Ring, layout: MaskLayout, data: bytes | bytearray | memoryview
) -> tuple[Residues, Residues]:
    """What `pack_mask_product` got. Raises as `unpack_residues` does."""
    size = layout.blocks * packed_bytes(ring, PRIMES - 1)
    second_B2N = unpack_residues(ring, data[:size], (layout.blocks,), PRIMES - 1)
    (outputs,) = unpack_residues(ring, data[size:], (1,), PRIMES - 1, _packed_outputs(layout))
    taken = outputs[:, : layout.blocks * layout.rows].reshape(PRIMES - 1, layout.blocks, -1)
    return taken.transpose(1, 0, 2), second_B2N


def _packed_outputs(layout: MaskLayout) -> int:
    return -(-layout.blocks * layout.rows // 8) * 8


def make_integer_linear(integers_OI: npt.NDArray[np.float32]) -> nn.Linear:
    """Integer weights, for `multiply_masked`."""
    return FastLinear(make_linear(copy_to_huge_pages(torch.from_numpy(integers_OI)), None))


@torch.no_grad()
def multiply_masked(integers: nn.Linear, masked_TI: Masked) -> Masked:
    """Products [T, O] of integer weights with masked vectors, modulo 2^40."""
    # Products of these parts of a number with a row are exact.
    bits = _EXACT_BITS - weight_bits(integers.in_features)
    shifts_P11 = np.arange(0, MASK_BITS, bits, dtype=np.uint64).reshape(-1, 1, 1)
    parts_PTI = masked_TI >> shifts_P11 & np.uint64((1 << bits) - 1)
    sums_PTO = integers(torch.from_numpy(parts_PTI.astype(np.float32)))
    products_PTO = sums_PTO.numpy().astype(np.int64).view(np.uint64) << shifts_P11
    total_TO: Masked = products_PTO.sum(0) & _MASK
    return total_TO


def hide(x_TI: Integers, masks_TI: Masked) -> Masked:
    """x - r modulo 2^40."""
    return (x_TI.astype(np.uint64) - masks_TI) & _MASK


def reveal(masked_TO: Masked, products_TO: Masked) -> Integers:
    """W x of W (x - r) and W r, all modulo 2^40."""
    shift = np.uint64(64 - MASK_BITS)
    return ((masked_TO + products_TO) << shift).view(np.int64) >> np.int64(shift)


def masked_bytes(count: int) -> int:
    return count * _MASKED_BYTES


def pack_masked(numbers: Masked) -> bytes:
    """Five bytes of each number below 2^40, the lowest first."""
    octets = np.ascontiguousarray(numbers, "<u8").view(np.uint8).reshape(-1, 8)
    return octets[:, :_MASKED_BYTES].tobytes()


def unpack_masked(data: bytes | bytearray | memoryview, shape: Sequence[int]) -> Masked:
    """Numbers of `shape`, of as many bytes as they have."""
    octets = np.zeros((math.prod(shape), 8), np.uint8)
    octets[:, :_MASKED_BYTES] = np.frombuffer(data, np.uint8).reshape(-1, _MASKED_BYTES)
    return octets.view("<u8").reshape(shape).astype(np.uint64, copy=False)
