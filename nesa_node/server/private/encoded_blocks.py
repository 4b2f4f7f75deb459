"""The weights of a span, encoded to be multiplied with vectors that the node cannot read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import nn

from nesa_node.core.errors import InsufficientMemoryError, ProtocolError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.engine.model.devices import RESERVE_BYTES, free_memory_bytes
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.encrypted_product import (
    EncodedMatrix,
    encode_matrix,
    multiply,
    required_rotations,
)
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.masked_product import (
    encode_integers,
    make_integer_linear,
    masked_bytes,
    multiply_encrypted_mask,
    multiply_masked,
    pack_mask_product,
    pack_masked,
    plan_mask_layout,
    quantize_rows,
    unpack_masked,
)
from nesa_node.privacy.packing import pack_residues
from nesa_node.privacy.products import LinearProduct, list_products, read_rows
from nesa_node.privacy.ring import Residues, Ring
from nesa_node.server.private.weight_store import WeightStore


class PrivateBlocks(ABC):
    """Products with the linear layers of blocks `span`, of vectors that the node cannot read."""

    scheme: ClassVar[PrivateScheme]
    rotations: Sequence[int] = ()
    """Steps of the rotations whose keys products need."""

    def __init__(self, ring: Ring, checkpoint: Checkpoint, span: Span) -> None:
        self.span = span
        self.ring = ring
        self._skeleton = Skeleton(checkpoint)
        self._products = {each.paths[0]: each for each in list_products(self._skeleton, span)}
        self._is_stopped = False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the encoded weights take."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Those of them that are in memory however many there are."""

    def open_store(self, folder: Path, max_bytes: int | None) -> WeightStore:
        """A store with `max_bytes` of memory, or all that is free, and the rest in `folder`.

        Raises `InsufficientMemoryError` where what has to be in memory does not fit, and
        `DiskLimitError` where the rest does not fit into the folder.
        """
        most = max(free_memory_bytes("cpu") - RESERVE_BYTES, 0)
        if max_bytes is not None:
            most = min(most, max_bytes)
        if self.resident_bytes > most:
            raise InsufficientMemoryError(
                f"integer weights of blocks {self.span} take {self.resident_bytes >> 20} MiB, of "
                f"{most >> 20} MiB: serve fewer blocks (--num-blocks), or raise --private-cache-gib"
            )
        return WeightStore(folder, most - self.resident_bytes, max(self.nbytes - most, 0))

    def encode(self, store: WeightStore) -> None:
        """Read and encode all weights. Blocks the thread, seconds for each block.

        Raises `UnsupportedModelError` for weights that cannot be encoded, `OSError` where the
        store's disk is full, and what reading raises.
        """
        for path, product in self._products.items():
            if self._is_stopped:
                return
            weight_OI = np.concatenate(list(read_rows(self._skeleton, product)))
            try:
                self._encode(path, weight_OI, store)
            except ValueError as error:
                raise UnsupportedModelError(f"{path}: {error}") from error

    @abstractmethod
    def _encode(self, path: str, weight_OI: npt.NDArray[np.float64], store: WeightStore) -> None:
        """Raise `ValueError` for weights that cannot be encoded."""

    def stop(self) -> None:
        """Have `encode` end early; the blocks are of no use then."""
        self._is_stopped = True

    def require_product(self, path: str) -> LinearProduct:
        """Raise `ProtocolError("bad_product")` for a layer that these blocks do not have."""
        product = self._products.get(path)
        if product is None:
            raise ProtocolError("bad_product", f"no product of blocks {self.span} has that name")
        return product

    @abstractmethod
    def chunks(self, path: str) -> int:
        """How many ciphertexts hold the product's input."""

    @abstractmethod
    def scale(self, path: str) -> float:
        """What a slot of 1 is in the coefficients of the product; 1 for integers."""

    @abstractmethod
    def multiply(
        self, path: str, chunks: Sequence[Residues], keys: Mapping[int, Residues]
    ) -> bytes:
        """The packed product with the ciphertexts [2, P - 1, N] of one input. Blocks the thread."""


class EncodedBlocks(PrivateBlocks):
    """Products with encrypted vectors (CKKS)."""

    scheme = "ckks"

    def __init__(self, ring: Ring, checkpoint: Checkpoint, span: Span) -> None:
        """Plan the products; nothing is read yet."""
        super().__init__(ring, checkpoint, span)
        self._layouts = {
            path: plan_layout(sum(each.outputs), each.inputs, ring.parameters.slots)
            for path, each in self._products.items()
        }
        self.rotations = required_rotations(list(self._layouts.values()))
        self._matrices: dict[str, EncodedMatrix] = {}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes(len(self.ring.primes)) for each in self._layouts.values())

    @property
    def resident_bytes(self) -> int:
        return 0

    def _encode(self, path: str, weight_OI: npt.NDArray[np.float64], store: WeightStore) -> None:
        layout = self._layouts[path]
        self._matrices[path] = encode_matrix(self.ring, layout, weight_OI, store.keep)

    def chunks(self, path: str) -> int:
        return len(self._layouts[path].chunks)

    def scale(self, path: str) -> float:
        return self._matrices[path].scale

    def multiply(
        self, path: str, chunks: Sequence[Residues], keys: Mapping[int, Residues]
    ) -> bytes:
        products = multiply(self.ring, self._matrices[path], chunks, keys)
        return pack_residues(self.ring, np.stack(products))


class IntegerBlocks(PrivateBlocks):
    """Products with masked vectors, and with encrypted masks."""

    scheme = "masks"

    def __init__(self, ring: Ring, checkpoint: Checkpoint, span: Span) -> None:
        """Plan the products; nothing is read yet."""
        super().__init__(ring, checkpoint, span)
        self._layouts = {
            path: plan_mask_layout(sum(each.outputs), each.inputs, ring.degree)
            for path, each in self._products.items()
        }
        self._weights: dict[str, tuple[nn.Linear, Residues]] = {}
        """Integers [O, I], and their values (`encode_integers`)."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes(self.ring.degree) for each in self._layouts.values())

    @property
    def resident_bytes(self) -> int:
        return sum(each.integer_bytes for each in self._layouts.values())

    def _encode(self, path: str, weight_OI: npt.NDArray[np.float64], store: WeightStore) -> None:
        integers_OI, _ = quantize_rows(weight_OI)
        encoded = encode_integers(self.ring, self._layouts[path], integers_OI)
        self._weights[path] = make_integer_linear(integers_OI), store.keep(encoded)

    def chunks(self, path: str) -> int:
        return self._layouts[path].chunks

    def scale(self, path: str) -> float:
        return 1.0

    def multiply(
        self, path: str, chunks: Sequence[Residues], keys: Mapping[int, Residues]
    ) -> bytes:
        layout, (_, encoded) = self._layouts[path], self._weights[path]
        product = multiply_encrypted_mask(self.ring, layout, encoded, np.stack(chunks))
        return pack_mask_product(self.ring, *product)

    def multiply_masked(self, path: str, payload: bytearray) -> bytes:
        """The packed products with packed masked vectors. Blocks the thread."""
        inputs = self._layouts[path].inputs
        masked_TI = unpack_masked(payload, (len(payload) // masked_bytes(inputs), inputs))
        return pack_masked(multiply_masked(self._weights[path][0], masked_TI))


SCHEMES: dict[str, type[PrivateBlocks]] = {
    each.scheme: each for each in (EncodedBlocks, IntegerBlocks)
}
