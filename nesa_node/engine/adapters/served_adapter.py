"""The part of a LoRA adapter that belongs to a served span, laid out for its products.

Where serving joins layers of the model to one product (q, k and v; gate and up), their matrices A
are stacked, and each B adds to its own outputs.

R rows of stacked matrices A, r those of one layer, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.adapters.peft_folder import MAX_ADAPTER_BYTES, LoraModule, PeftFolder
from nesa_node.engine.kernels.low_rank import (
    DESCRIPTOR_FIELDS,
    PART_FIELDS,
    ROWS_AT_ONCE,
    LowRankFunctions,
    from_blocks,
    load_low_rank,
    to_blocks,
)
from nesa_node.engine.kernels.machine_code import allocate_in_huge_pages
from nesa_node.engine.weights.files import read_tensor

ALIGNED_ITEMS = 32
"""Matrices begin at multiples of it: a cache line of the smallest dtype."""


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """A linear layer of the model: outputs `start` to `start + count` of a served one."""

    name: str
    """Its path in transformers' layer."""
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class ServedLinear:
    """A linear layer as it is served: one of the model's, or several joined to one product."""

    in_features: int
    layers: tuple[ModelLayer, ...]

    @property
    def out_features(self) -> int:
        return sum(layer.count for layer in self.layers)

    @classmethod
    def join(cls, in_features: int, outputs: Mapping[str, int]) -> ServedLinear:
        """Make one of the model's layers, given by name and number of outputs, in order."""
        starts = accumulate(outputs.values(), initial=0)
        layers = [
            ModelLayer(name, start, count)
            for (name, count), start in zip(outputs.items(), starts, strict=False)
        ]
        return cls(in_features, tuple(layers))


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """What adapters of a span have to fit: its linear layers, the same in each block."""

    span: Span
    num_blocks: int
    """Of the whole model."""
    layers_path: str
    """Where transformers' model has its blocks."""
    linears: tuple[ServedLinear, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def layer_names(self) -> list[str]:
        return [layer.name for linear in self.linears for layer in linear.layers]

    @property
    def num_fields(self) -> int:
        """Fields of the descriptor of a linear layer."""
        return DESCRIPTOR_FIELDS + PART_FIELDS * max(len(each.layers) for each in self.linears)

    def load_functions(self) -> LowRankFunctions | None:
        """Return machine code for these layers; None where torch's operations have to do."""
        sizes = [linear.in_features for linear in self.linears]
        sizes += [layer.count for linear in self.linears for layer in linear.layers]
        return load_low_rank(self.dtype, self.device, sizes)

    def number_of(self, block: int, linear: int) -> int:
        """Number of a linear layer, by the model's block and its index in `linears`."""
        return (block - self.span.start) * len(self.linears) + linear


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The matrix B of one of the model's layers, transposed, and where it reads and adds."""

    b: Tensor
    """[r * O] in blocks, where machine code reads it (`to_blocks`), else [r, O]."""
    rank: int
    first: int
    """Of the rows of A."""
    scale: float
    start: int
    """Of the outputs."""

    @property
    def count(self) -> int:
        return self.b.numel() // self.rank

    @property
    def b_rO(self) -> Tensor:
        """A copy where it is stored in blocks."""
        return from_blocks(self.b, self.rank) if self.b.ndim == 1 else self.b


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """y += s B A x of a served linear layer. A has rows of zeros behind the last part's."""

    a_RI: Tensor
    scales_R: Tensor
    """float32, on the CPU."""
    parts: tuple[LowRankPart, ...]

    @property
    def rows(self) -> int:
        return len(self.a_RI)


class ServedAdapter:
    """The part of a LoRA adapter that belongs to a span, in memory. It does not change.

    Its matrices have the dtype of activations, as the base weights that are not quantized: products
    are sums in float32 either way, and half the bytes are read. Adapters trained in float32 lose in
    bfloat16 what their base model has lost.
    """

    def __init__(self, layout: SpanLayout, products: Sequence[LowRankProduct | None]) -> None:
        """`products`: by number in `layout`, None where nothing is adapted."""
        self.layout = layout
        self.products = tuple(products)
        self.max_rows = max((each.rows for each in self.products if each is not None), default=0)
        self.adapted_linears = frozenset(
            number % len(layout.linears)
            for number, each in enumerate(self.products)
            if each is not None
        )
        """Indices in `layout.linears` of what is adapted in some block."""
        self.descriptors = self._describe()
        """Of all products, for machine code."""
        kept = [part.b for each in self.products if each is not None for part in each.parts]
        kept += [
            t for each in self.products if each is not None for t in (each.a_RI, each.scales_R)
        ]
        self.nbytes = sum(tensor.nbytes for tensor in kept) + ctypes.sizeof(self.descriptors)
        """Memory that it takes."""

    @classmethod
    def load(
        cls, folder: Path | PeftFolder, layout: SpanLayout, *, max_bytes: int = MAX_ADAPTER_BYTES
    ) -> ServedAdapter:
        """Read the span's part from a folder of PEFT's format. Blocks the thread.

        Peak memory is `nbytes` and three times that of the largest matrix. Raises what
        `PeftFolder.open` and `PeftFolder.modules` do, and `CorruptCheckpointError` for matrices
        that do not fit the model's layers, or have values that are not finite in the span's dtype.
        """
        if not isinstance(folder, PeftFolder):
            folder = PeftFolder.open(folder, max_bytes=max_bytes)
        source = folder
        found = _find_modules(source, layout)
        items = compute_adapter_bytes(source, layout, max_bytes=max_bytes) // layout.dtype.itemsize
        # Compiled here, so that no iteration waits for it.
        is_native = layout.load_functions() is not None
        arena = _Arena(items, layout)
        products = [
            _load_product(source.folder, linear, found, block, arena, in_blocks=is_native)
            for block, linear in product(range(layout.span.start, layout.span.end), layout.linears)
        ]
        return cls(layout, products)

    def product_of(self, block: int, linear: int) -> LowRankProduct | None:
        """Return the product of a linear layer, by the model's block and its index in the layout.

        None where it is not adapted.
        """
        return self.products[self.layout.number_of(block, linear)]

    def _describe(self) -> ctypes.Array[ctypes.c_int64]:
        width = self.layout.num_fields
        fields = (ctypes.c_int64 * (width * len(self.products)))()
        for number, each in enumerate(self.products):
            if each is not None:
                described: list[ctypes.c_int64 | int] = [
                    each.a_RI.data_ptr(),
                    each.rows,
                    each.scales_R.data_ptr(),
                    len(each.parts),
                ]
                for part in each.parts:
                    where = part.b.data_ptr()
                    described += [where, part.first, part.rank, part.start, part.count]
                start = number * width
                fields[start : start + len(described)] = described
        return fields


def compute_adapter_bytes(
    source: PeftFolder, layout: SpanLayout, *, max_bytes: int = MAX_ADAPTER_BYTES
) -> int:
    """Return the bytes of the matrices that `ServedAdapter.load` will hold; reads no tensor.

    Raises as it does, and `UnsupportedModelError` beyond `max_bytes`.
    """
    found = _find_modules(source, layout)
    items = 0
    for block, linear in product(range(layout.span.start, layout.span.end), layout.linears):
        adapted = _adapted_layers(linear, found, block)
        items += _align(_pad_rows(sum(lora.rank for _, lora in adapted)) * linear.in_features)
        items += sum(_align(lora.rank * layer.count) for layer, lora in adapted)
    if (nbytes := items * layout.dtype.itemsize) > max_bytes:
        raise UnsupportedModelError(
            f"{source.folder} takes {nbytes / 2**20:.1f} MiB for blocks {layout.span}; adapters of "
            f"at most {max_bytes >> 20} MiB are served here"
        )
    return nbytes


class _Arena:
    """One allocation that all matrices of an adapter share, in the order of their use."""

    def __init__(self, items: int, layout: SpanLayout) -> None:
        self.dtype = layout.dtype
        if layout.device.type == "cpu":
            self._memory = allocate_in_huge_pages((items,), layout.dtype)
        else:
            self._memory = torch.empty(items, dtype=layout.dtype, device=layout.device)
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        tensor = self._memory[self._used : self._used + count].view(shape)
        self._used += _align(count)
        return tensor


Modules = Mapping[tuple[int, str], LoraModule]


def _find_modules(source: PeftFolder, layout: SpanLayout) -> Modules:
    """Return the adapted layers, those of the span with the shapes of the model's."""
    found = source.modules(layout.layers_path, layout.num_blocks, layout.layer_names)
    for block, linear in product(range(layout.span.start, layout.span.end), layout.linears):
        for layer, lora in _adapted_layers(linear, found, block):
            inputs, outputs = lora.a.shape[1], lora.b.shape[0]
            if (inputs, outputs) != (linear.in_features, layer.count):
                raise CorruptCheckpointError(
                    f"{source.folder}: {layer.name} of block {block} has {linear.in_features} "
                    f"inputs and {layer.count} outputs, its adapter {inputs} and {outputs}; it was "
                    "made for another model"
                )
    return found


def _adapted_layers(
    linear: ServedLinear, found: Modules, block: int
) -> list[tuple[ModelLayer, LoraModule]]:
    return [
        (layer, found[block, layer.name]) for layer in linear.layers if (block, layer.name) in found
    ]


def _load_product(
    folder: Path,
    linear: ServedLinear,
    found: Modules,
    block: int,
    arena: _Arena,
    *,
    in_blocks: bool,
) -> LowRankProduct | None:
    adapted = _adapted_layers(linear, found, block)
    if not adapted:
        return None
    rows = _pad_rows(sum(lora.rank for _, lora in adapted))
    a_RI, scales_R = arena.take(rows, linear.in_features), torch.zeros(rows, dtype=torch.float32)
    parts: list[LowRankPart] = []
    first = 0
    for layer, lora in adapted:
        end = first + lora.rank
        b_rO = read_tensor(folder, lora.b).t().to(arena.dtype)
        b = arena.take(*([b_rO.numel()] if in_blocks else b_rO.shape))
        b.copy_(to_blocks(b_rO) if in_blocks else b_rO)
        a_RI[first:end].copy_(read_tensor(folder, lora.a))
        scales_R[first:end] = lora.scale
        if not all(bool(each.isfinite().all()) for each in (a_RI[first:end], b, scales_R)):
            raise CorruptCheckpointError(
                f"{folder}: {layer.name} of block {block} has values that are not finite in "
                f"{str(arena.dtype).removeprefix('torch.')}"
            )
        parts.append(LowRankPart(b, lora.rank, first, lora.scale, layer.start))
        first = end
    a_RI[first:].zero_()
    return LowRankProduct(a_RI, scales_R, tuple(parts))


def _pad_rows(rows: int) -> int:
    return -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE


def _align(items: int) -> int:
    return -(-items // ALIGNED_ITEMS) * ALIGNED_ITEMS
