"""Root of a span's weights: whole tensors of the checkpoint, hashed into one tree.

They are hashed as stored, quantized weights as the values that they stand for.
"""

from __future__ import annotations

from nesa_node.core.ids import Span
from nesa_node.engine.weights.checkpoint import Checkpoint, hash_tensor
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.verification.attestation.binding import weights_root


def hash_span(checkpoint: Checkpoint, span: Span, known: dict[str, bytes]) -> bytes:
    """Root over the checkpoint's tensors of the blocks `span`. Blocks the thread.

    Digests that are not in `known` are computed, one tensor in memory at a time, and put there.
    Raises `CorruptCheckpointError`, and what `Checkpoint.fetch` raises.
    """
    names = span_tensors(checkpoint, span)
    missing = [name for name in names if name not in known]
    checkpoint.fetch(missing)
    for name in missing:
        known[name] = hash_tensor(checkpoint.read(name))
    return weights_root({name: known[name] for name in names})


def span_tensors(checkpoint: Checkpoint, span: Span) -> list[str]:
    """Names of the checkpoint's tensors that the blocks `span` are made of."""
    skeleton = Skeleton(checkpoint)
    return skeleton.source_names(skeleton.block_names(span))
