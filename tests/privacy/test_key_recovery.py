"""What a client must never give away: a decryption, of which its key is computed (Li and Micciancio
2021). The reason why private sessions show no hidden states and no log probabilities.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.encrypted_product import encode_matrix, multiply
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Residues
from nesa_node.privacy.secret_key import SecretKey
from nesa_node.privacy.slots import coefficients_of, slots_of
from tests.privacy.keys import expanded_keys

RING = make_ring(RingParameters())

Integers = npt.NDArray[np.int64]


def recover_secret(
    ciphertext: Residues, slots: npt.NDArray[np.complex128], scale: float
) -> Integers:
    """s = (m - c0) / c1 modulo the first prime; [2, P, N] coefficients decrypt to `slots`."""
    prime = RING.primes[0]
    message_N = RING.residues(coefficients_of(slots, scale), 1)
    c0, c1 = ciphertext[:, :1]
    values = RING.values(RING.subtract(message_N, c0)), RING.values(c1)
    inverses = np.array([[pow(int(each), -1, prime) for each in values[1][0]]], np.uint32)
    secret_N = RING.coefficients(RING.multiply(values[0], inverses))[0].astype(np.int64)
    centered: Integers = np.where(secret_N > prime // 2, secret_N - prime, secret_N)
    return centered


def test_one_decryption_yields_the_key_and_with_it_all_of_a_session() -> None:
    rng = np.random.default_rng(0)
    key, layout = SecretKey(RING), plan_layout(64, 128, RING.parameters.slots)
    matrix = encode_matrix(RING, layout, rng.normal(size=(64, 128)))
    keys = expanded_keys(key, RING, [layout])

    def product(x: npt.NDArray[np.float64]) -> Residues:
        chunks = [key.encrypt(slots).expand(RING) for slots in layout.pack(x)]
        return multiply(RING, matrix, chunks, keys)[0]

    shown = product(rng.uniform(-1, 1, 128))
    secret_N = recover_secret(shown, key.decrypt(shown, matrix.scale), matrix.scale)
    assert set(secret_N) == {-1, 0, 1}

    # Another input, of which nothing was shown.
    x = rng.uniform(-1, 1, 128)
    (slots,) = layout.pack(x)
    fresh = key.encrypt(slots).expand(RING)
    secret = RING.values(RING.residues(secret_N, 3))
    message = RING.coefficients(RING.add(fresh[0], RING.multiply(fresh[1], secret)))
    assert np.abs(slots_of(_center(message), 2.0**38) - slots).max() < 1e-6


def _center(residues: Residues) -> Integers:
    """Integers [N] modulo the first two primes, of which a fresh message has 38 bits."""
    low, high = RING.primes[:2]
    first, second = residues[:2].astype(np.int64)
    whole = first + (second - first) * pow(low, -1, high) % high * low
    centered: Integers = np.where(whole > low * high // 2, whole - low * high, whole)
    return centered
