"""Random polynomials: secrets and errors from the system's generator, uniform ones from a seed.

N degree.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cache
from math import exp, prod

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.masked_product import MASK_BITS, Masked
from nesa_node.privacy.parameters import SIGMA
from nesa_node.privacy.ring import Residues, Ring

SEED_BYTES = 32
_LARGEST_ERROR = 41
"""Thirteen standard deviations: larger errors have a probability of 2^-118."""


def random_ternary(count: int) -> npt.NDArray[np.int64]:
    """Uniform numbers of -1, 0 and 1."""
    kept = np.empty(0, np.uint8)
    while len(kept) < count:
        drawn = np.frombuffer(secrets.token_bytes(count + count // 16 + 64), np.uint8)
        kept = np.concatenate([kept, drawn[drawn < 255]])
    return (kept[:count] % 3).astype(np.int64) - 1


def random_errors(count: int) -> npt.NDArray[np.int64]:
    """Numbers of the discrete normal distribution with standard deviation `SIGMA`."""
    drawn = np.frombuffer(secrets.token_bytes(8 * count), np.uint64) >> np.uint64(11)
    return np.searchsorted(_error_bounds(), drawn, side="right").astype(np.int64) - _LARGEST_ERROR


@cache
def _error_bounds() -> npt.NDArray[np.uint64]:
    weights = [exp(-(k * k) / (2 * SIGMA**2)) for k in range(-_LARGEST_ERROR, _LARGEST_ERROR + 1)]
    shares = np.cumsum(np.array(weights) / sum(weights))[:-1]
    return (shares * 2.0**53).astype(np.uint64)


def random_masks(*shape: int) -> Masked:
    """Uniform numbers below 2^40, each to hide one number."""
    drawn = np.frombuffer(secrets.token_bytes(8 * prod(shape)), np.uint64)
    return drawn.reshape(shape) >> np.uint64(64 - MASK_BITS)


def uniform_residues(ring: Ring, primes: int, seed: bytes, label: bytes) -> Residues:
    """Uniform residues [primes, N] that `seed` and `label` stand for, by rejection."""
    rows = [
        _uniform_below(ring.primes[index], ring.degree, seed + bytes([index]) + label)
        for index in range(primes)
    ]
    return np.stack(rows)


def _uniform_below(prime: int, count: int, name: bytes) -> Residues:
    # Primes are just below a power of two: few numbers are rejected.
    mask, size = np.uint32((1 << prime.bit_length()) - 1), 4 * (count + count // 8 + 64)
    while True:
        drawn = np.frombuffer(hashlib.shake_128(name).digest(size), "<u4") & mask
        kept = drawn[drawn < prime]
        if len(kept) >= count:
            return kept[:count].astype(np.uint32)
        size *= 2
