"""The weights of a span, encoded to be multiplied with encrypted vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from transformers.pytorch_utils import Conv1D

from nesa_node.core.errors import InsufficientMemoryError, ProtocolError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.model.devices import RESERVE_BYTES, free_memory_bytes
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.encrypted_product import (
    EncodedMatrix,
    encode_matrix,
    multiply,
    required_rotations,
)
from nesa_node.privacy.layout import ProductLayout, plan_layout
from nesa_node.privacy.products import list_products
from nesa_node.privacy.ring import Residues, Ring


class EncodedBlocks:
    """Products with the linear layers of blocks `span`. Encoding takes seconds for each block."""

    def __init__(
        self, ring: Ring, checkpoint: Checkpoint, span: Span, max_bytes: int | None = None
    ) -> None:
        """Plan the products; nothing is read yet.

        Raises `InsufficientMemoryError` where the encoded weights have more than `max_bytes`, or
        than this machine's free memory.
        """
        self.span = span
        self._ring = ring
        self._skeleton = Skeleton(checkpoint)
        self._products = {each.paths[0]: each for each in list_products(self._skeleton, span)}
        self._layouts = {
            path: plan_layout(sum(each.outputs), each.inputs, ring.parameters.slots)
            for path, each in self._products.items()
        }
        self.rotations = required_rotations(list(self._layouts.values()))
        self._matrices: dict[str, EncodedMatrix] = {}
        self._is_stopped = False
        self.nbytes = sum(each.nbytes(len(ring.primes)) for each in self._layouts.values())
        free = free_memory_bytes("cpu") - RESERVE_BYTES
        if self.nbytes > (most := min(free, free if max_bytes is None else max_bytes)):
            raise InsufficientMemoryError(
                f"weights of blocks {span} take {self.nbytes >> 20} MiB where vectors are "
                f"encrypted, of {max(most, 0) >> 20} MiB: serve fewer blocks (--num-blocks), or "
                "raise --private-cache-gib"
            )

    def encode(self) -> None:
        """Read and encode all weights. Blocks the thread.

        Raises `UnsupportedModelError` for weights that cannot be encoded, and what reading raises.
        """
        names = [f"{path}.weight" for product in self._products.values() for path in product.paths]
        self._skeleton.checkpoint.fetch(self._skeleton.source_names(names))
        for path, product in self._products.items():
            if self._is_stopped:
                return
            weight = np.concatenate([self._read_weight(each) for each in product.paths])
            try:
                self._matrices[path] = encode_matrix(self._ring, self._layouts[path], weight)
            except ValueError as error:
                raise UnsupportedModelError(f"{path}: {error}") from error

    def stop(self) -> None:
        """Have `encode` end early; the blocks are of no use then."""
        self._is_stopped = True

    def _read_weight(self, path: str) -> npt.NDArray[np.float64]:
        weight: npt.NDArray[np.float64] = (
            self._skeleton.read_weight(f"{path}.weight").double().numpy()
        )
        layer = self._skeleton.model.get_submodule(path)
        return weight.T if isinstance(layer, Conv1D) else weight

    def find_layout(self, path: str) -> ProductLayout:
        """Raises `ProtocolError("bad_product")` for a layer that these blocks do not have."""
        layout = self._layouts.get(path)
        if layout is None:
            raise ProtocolError("bad_product", f"no product of blocks {self.span} has that name")
        return layout

    def scale(self, path: str) -> float:
        """What a slot of 1 is in the coefficients of the product."""
        return self._matrices[path].scale

    def multiply(
        self, path: str, chunks: Sequence[Residues], keys: Mapping[int, Residues]
    ) -> list[Residues]:
        """See `encrypted_product.multiply`. Blocks the thread."""
        return multiply(self._ring, self._matrices[path], chunks, keys)
