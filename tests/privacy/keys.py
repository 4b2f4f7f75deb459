"""Keys as a node has them."""

from __future__ import annotations

from collections.abc import Sequence

from nesa_node.privacy.ciphertext import RotationKeys
from nesa_node.privacy.encrypted_product import required_rotations
from nesa_node.privacy.layout import ProductLayout
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.privacy.secret_key import SecretKey


def expanded_keys(
    key: SecretKey, ring: Ring, layouts: Sequence[ProductLayout]
) -> dict[int, Residues]:
    rotations = required_rotations(layouts)
    halves = {steps: key.rotation_key(steps) for steps in rotations}
    return RotationKeys(key.rotation_seed, halves).expand(ring)
