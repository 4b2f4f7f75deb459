"""The client's half of CKKS: it alone encrypts, decrypts, and makes keys.

P primes, N degree, D digits, S slots.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.ciphertext import FreshCiphertext, rotation_label
from nesa_node.privacy.parameters import INPUT_SCALE
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.sampling import (
    SEED_BYTES,
    random_errors,
    random_ternary,
    uniform_residues,
)
from nesa_node.privacy.slots import coefficients_of, slots_of


class SecretKey:
    """A ternary secret. It stays in this process's memory."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._count = len(ring.primes)
        self.rotation_seed = secrets.token_bytes(SEED_BYTES)
        self._secret_PN = ring.values(ring.residues(random_ternary(ring.degree), self._count))

    def encrypt(self, slots_S: npt.NDArray[np.complex128]) -> FreshCiphertext:
        """Encrypt slots of at most 1 in size. Raises `ValueError` for larger or infinite ones."""
        if not np.all(np.abs(slots_S) <= 1):
            raise ValueError("slots must be at most 1 in size")
        ring, primes, seed = self._ring, self._count - 1, secrets.token_bytes(SEED_BYTES)
        message_N = coefficients_of(slots_S, INPUT_SCALE) + random_errors(ring.degree)
        a_PN = uniform_residues(ring, primes, seed, b"input")
        message_PN = ring.values(ring.residues(message_N, primes))
        return FreshCiphertext(self._subtract_product(message_PN, a_PN), seed)

    def rotation_key(self, steps: int) -> Residues:
        """Values b [D, P, N] of the key that rotates slots to the left by `steps`.

        Its other half is made of `rotation_seed` (`ciphertext.py` `RotationKeys`).
        """
        ring, last = self._ring, self._ring.primes[-1]
        rotated_PN = self._secret_PN[:, ring.rotation(steps)]
        digits = []
        for digit in range(self._count - 1):
            a_PN = uniform_residues(
                ring, self._count, self.rotation_seed, rotation_label(steps, digit)
            )
            error_N = random_errors(ring.degree)
            message_PN = ring.values(ring.residues(error_N, self._count))
            # Of the gadget P (Q / q) [(Q / q)^-1]_q all residues but that modulo q are zero.
            factor_PN = np.zeros_like(rotated_PN)
            factor_PN[digit] = last % ring.primes[digit]
            message_PN = ring.add(message_PN, ring.multiply(factor_PN, rotated_PN))
            digits.append(self._subtract_product(message_PN, a_PN))
        return np.stack(digits)

    def decrypt(self, parts: Residues, scale: float) -> npt.NDArray[np.complex128]:
        """Slots [S], divided by `scale`, of a ciphertext's coefficients [2, 2, N]."""
        ring = self._ring
        c0, c1 = parts
        product = ring.coefficients(ring.multiply(ring.values(c1), self._secret_PN[:2]))
        first, second = ring.add(c0, product).astype(np.int64)
        # Garner: the integer modulo both primes, which has less than 53 bits.
        low, high = ring.primes[:2]
        whole = first + (second - first) * pow(low, -1, high) % high * low
        centered = np.where(whole > low * high // 2, whole - low * high, whole)
        return slots_of(centered, scale)

    def _subtract_product(self, message_PN: Residues, a_PN: Residues) -> Residues:
        """message - a s."""
        product = self._ring.multiply(a_PN, self._secret_PN[: len(a_PN)])
        return self._ring.subtract(message_PN, product)
