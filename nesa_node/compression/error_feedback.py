"""Lossy coding of what is sent again at every step: gradients of parameters.

What coding loses of a tensor is added to the next one of its name (error feedback: Seide et al.,
2014). So the sum of all that a receiver gets differs from the sum of what was sent by the loss of
one tensor, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.tensors import TensorMeta


class FeedbackEncoder:
    """Encodes tensors by name. Losses count once their step is over (`commit`)."""

    def __init__(self, codec: str) -> None:
        """`codec` is one of the registry, or "none", which loses nothing."""
        self.codec = codec
        self._lost: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        """Of the step under way."""

    def encode(self, values: Mapping[str, Tensor]) -> dict[str, tuple[TensorMeta, memoryview]]:
        """Encode float32 tensors; a lossy codec gets each as one row, [1, N].

        Takes long for large ones, so that it may run in another thread. A call that goes on after
        its step was discarded leaves no losses.
        """
        lost, pending = self._lost, self._pending
        return {
            name: self._encode_one(name, value, lost, pending) for name, value in values.items()
        }

    def _encode_one(
        self, name: str, value: Tensor, lost: Mapping[str, Tensor], pending: dict[str, Tensor]
    ) -> tuple[TensorMeta, memoryview]:
        if self.codec == UNCOMPRESSED:
            return tensors.encode(value)
        wanted_1N = value.reshape(1, -1)
        if (before := pending.get(name, lost.get(name))) is not None:
            wanted_1N = wanted_1N + before
        meta, payload = tensors.encode(wanted_1N, codec=self.codec)
        sent_1N = tensors.decode(meta, bytes(payload), max_bytes=2 * wanted_1N.nbytes + 4096)
        pending[name] = wanted_1N - sent_1N
        return meta, payload

    def commit(self) -> None:
        """The step is over: its losses are added to the next."""
        self._lost = {**self._lost, **self._pending}
        self._pending = {}

    def discard(self) -> None:
        """The step begins again."""
        self._pending = {}

    def reset(self) -> None:
        """Another state takes the place of all steps."""
        self._lost, self._pending = {}, {}
