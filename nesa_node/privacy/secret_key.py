"""The client's half of CKKS, and of BFV for masks: it alone encrypts, decrypts, and makes keys.

P primes, N degree, D digits, S slots; B blocks and R rows of a product with a mask.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.ciphertext import FreshCiphertext, rotation_label
from nesa_node.privacy.masked_product import MASK_BITS, Masked
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
        ring = self._ring
        message_N = coefficients_of(slots_S, INPUT_SCALE) + random_errors(ring.degree)
        return self._encrypt(ring.residues(message_N, self._count - 1))

    def encrypt_mask(self, numbers_N: Masked) -> FreshCiphertext:
        """Encrypt numbers m below t = 2^40 as the integers nearest to q m / t."""
        ring, primes = self._ring, self._ring.primes[: self._count - 1]
        # Modulo a prime of q, (q m + t / 2 - rest) / t is (t / 2 - rest) / t.
        half = np.uint64(1 << (MASK_BITS - 1))
        factor = np.uint64(math.prod(primes) % (1 << MASK_BITS))
        rest_N = (numbers_N * factor + half) & np.uint64((1 << MASK_BITS) - 1)
        inverses = [pow(1 << MASK_BITS, -1, prime) for prime in primes]
        message_PN = ring.multiply(
            ring.residues((half - rest_N).view(np.int64), len(primes)),
            np.array(inverses, np.uint32)[:, None],
        )
        errors_PN = ring.residues(random_errors(ring.degree), len(primes))
        return self._encrypt(ring.add(message_PN, errors_PN))

    def _encrypt(self, message_PN: Residues) -> FreshCiphertext:
        """Encrypt coefficients, errors among them."""
        ring, primes, seed = self._ring, len(message_PN), secrets.token_bytes(SEED_BYTES)
        a_PN = uniform_residues(ring, primes, seed, b"input")
        return FreshCiphertext(self._subtract_product(ring.values(message_PN), a_PN), seed)

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
        c0, c1 = parts
        phase_N, _ = self._join(self._ring.add(c0, self._multiply(c1)))
        return slots_of(phase_N, scale)

    def decrypt_products(
        self, first_B2R: Residues, second_B2N: Residues, places_R: npt.NDArray[np.int64]
    ) -> Masked:
        """Numbers [B, R] below t = 2^40 of a product with an encrypted mask
        (`multiply_encrypted_mask`).
        """
        product_B2R = self._multiply(second_B2N)[..., places_R]
        phase_BR, modulus = self._join(self._ring.add(first_B2R, product_B2R))
        # A phase has 52 bits: what rounding makes of it is far less than the noise it may have.
        numbers_BR = np.rint(phase_BR * (float(1 << MASK_BITS) / modulus)).astype(np.int64)
        found: Masked = numbers_BR.view(np.uint64) & np.uint64((1 << MASK_BITS) - 1)
        return found

    def _multiply(self, second: Residues) -> Residues:
        """Coefficients [..., 2, N] of polynomials times the secret."""
        ring = self._ring
        return ring.coefficients(ring.multiply(ring.values(second), self._secret_PN[:2]))

    def _join(self, residues: Residues) -> tuple[npt.NDArray[np.int64], int]:
        """Garner: integers nearest to 0 of residues [..., 2, N], and the modulus, below 2^52."""
        low, high = self._ring.primes[:2]
        first, second = residues[..., 0, :].astype(np.int64), residues[..., 1, :].astype(np.int64)
        whole = first + (second - first) * pow(low, -1, high) % high * low
        modulus = low * high
        return np.where(whole > modulus // 2, whole - modulus, whole), modulus

    def _subtract_product(self, message_PN: Residues, a_PN: Residues) -> Residues:
        """message - a s."""
        product = self._ring.multiply(a_PN, self._secret_PN[: len(a_PN)])
        return self._ring.subtract(message_PN, product)
