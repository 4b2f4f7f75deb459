"""Keys as a node has them, and what a client gets of products under them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.ciphertext import RotationKeys
from nesa_node.privacy.encrypted_product import encode_matrix, multiply, required_rotations
from nesa_node.privacy.layout import ProductLayout
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.secret_key import SecretKey


def expanded_keys(
    key: SecretKey, ring: Ring, layouts: Sequence[ProductLayout]
) -> dict[int, Residues]:
    rotations = required_rotations(layouts)
    halves = {steps: key.rotation_key(steps) for steps in rotations}
    return RotationKeys(key.rotation_seed, halves).expand(ring)


def decrypted_products(
    ring: Ring,
    layout: ProductLayout,
    weight_OI: npt.NDArray[np.float64],
    x_TI: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Products [T, O] of inputs of at most 1 in size, encrypted under a new key."""
    key = SecretKey(ring)
    keys, matrix = expanded_keys(key, ring, [layout]), encode_matrix(ring, layout, weight_OI)
    rows = []
    for x in x_TI:
        chunks = [key.encrypt(slots).expand(ring) for slots in layout.pack(x)]
        blocks = multiply(ring, matrix, chunks, keys)
        rows.append(layout.unpack([key.decrypt(block, matrix.scale) for block in blocks]))
    return np.stack(rows)
