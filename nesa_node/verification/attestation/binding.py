"""What a node has its hardware sign, so that a quote is about this node, client and model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from nesa_node.verification.seal_tree import HASH_BYTES, SealTree

NONCE_BYTES = 32


def report_data(node_key: bytes, nonce: bytes, weights_root: bytes) -> bytes:
    """64 bytes to be signed: a hash of the node's public key, the client's nonce and the weights.

    NVIDIA's GPUs sign the first 32.
    """
    made = hashlib.blake2b(digest_size=64, person=b"nesa attest 1")
    for part in (node_key, nonce, weights_root):
        made.update(len(part).to_bytes(4, "big") + part)
    return made.digest()


def weights_root(digests: Mapping[str, bytes]) -> bytes:
    """Root of the tree over a span's tensors, by name; `digests` are hashes of whole tensors."""
    tree = SealTree()
    for name in sorted(digests):
        encoded = name.encode()
        leaf = hashlib.blake2b(digest_size=HASH_BYTES, person=b"tensor")
        leaf.update(len(encoded).to_bytes(4, "big") + encoded + digests[name])
        tree.append(leaf.digest())
    return tree.root
