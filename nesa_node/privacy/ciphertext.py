"""What client and node send each other: ciphertexts, keys of rotations.

P primes, N degree, D digits: the primes but the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.sampling import uniform_residues


@dataclass(frozen=True, slots=True)
class FreshCiphertext:
    """Encryption under a secret key: values of c0 [P - 1, N], and the seed of c1."""

    c0: Residues
    seed: bytes

    def expand(self, ring: Ring) -> Residues:
        """Both polynomials [2, P - 1, N]."""
        return np.stack([self.c0, uniform_residues(ring, len(self.c0), self.seed, b"input")])


@dataclass(frozen=True, slots=True)
class RotationKeys:
    """Keys that rotate slots: for each number of steps the values b [D, P, N] of a key for each
    digit, whose a are uniform.
    """

    seed: bytes
    b: dict[int, Residues]

    def expand(self, ring: Ring) -> dict[int, Residues]:
        """Keys (b, a) of each rotation: [D, 2, P, N]."""
        return {
            steps: np.stack([b_DPN, self._expand_one(ring, steps, b_DPN.shape)], 1)
            for steps, b_DPN in self.b.items()
        }

    def _expand_one(self, ring: Ring, steps: int, shape: tuple[int, ...]) -> Residues:
        digits, primes, _ = shape
        labels = [rotation_label(steps, digit) for digit in range(digits)]
        return np.stack([uniform_residues(ring, primes, self.seed, label) for label in labels])


def rotation_label(steps: int, digit: int) -> bytes:
    """What a key's uniform part is made from, beside the seed."""
    return f"rotation {steps} {digit}".encode()
