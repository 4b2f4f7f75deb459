"""Residues as bytes: as many bits for each as its prime has.

P primes, N degree.
"""

from __future__ import annotations

import numpy as np

from nesa_node.core.errors import ProtocolError
from nesa_node.privacy.ring import Residues, Ring


def packed_bytes(ring: Ring, primes: int, count: int | None = None) -> int:
    """Bytes of the residues [primes, N] of a polynomial, or of [primes, count], a multiple of 8."""
    return (count or ring.degree) // 8 * sum(ring.parameters.prime_bits[:primes])


def pack_residues(ring: Ring, residues: Residues) -> bytes:
    """Bytes of polynomials [..., P, N], each residue with its highest bit first.

    Of polynomials' N coefficients only some may be given, whose number is a multiple of 8.
    """
    *_, primes, degree = residues.shape
    rows = residues.reshape(-1, primes, degree)
    parts = []
    for polynomial in rows:
        for row, bits in zip(polynomial, ring.parameters.prime_bits, strict=False):
            whole = np.unpackbits(row.astype(">u4").view(np.uint8)).reshape(degree, 32)
            parts.append(np.packbits(whole[:, 32 - bits :]))
    return np.concatenate(parts).tobytes()


def unpack_residues(
    ring: Ring,
    data: bytes | bytearray | memoryview,
    shape: tuple[int, ...],
    primes: int,
    coefficients: int | None = None,
) -> Residues:
    """Polynomials [*shape, primes, N] of what `pack_residues` made; N may be fewer `coefficients`.

    Raises `ProtocolError("bad_residues")` for another number of bytes, and for numbers that are not
    below their prime.
    """
    count, degree = int(np.prod(shape)), coefficients or ring.degree
    if len(data) != (expected := count * packed_bytes(ring, primes, degree)):
        raise ProtocolError("bad_residues", f"{expected} bytes expected, {len(data)} came")
    found = np.empty((count, primes, degree), np.uint32)
    whole, at = np.frombuffer(data, np.uint8), 0
    for polynomial in found:
        for index, bits in enumerate(ring.parameters.prime_bits[:primes]):
            size = degree // 8 * bits
            taken = np.unpackbits(whole[at : at + size]).reshape(degree, bits)
            padded = np.zeros((degree, 32), np.uint8)
            padded[:, 32 - bits :] = taken
            polynomial[index] = np.packbits(padded).view(">u4")
            at += size
    if (found >= ring.primes_P1[:primes]).any():
        raise ProtocolError("bad_residues", "a residue is not below its prime")
    return found.reshape(*shape, primes, degree)
