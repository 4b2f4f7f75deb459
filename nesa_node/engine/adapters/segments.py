"""Low-rank products of the tokens of an iteration, by the adapters of their rows.

Tokens of one adapter are a segment (Punica, Chen et al. 2023). Few tokens are computed by machine
code, which reads each adapter's matrices once for its segment; many by torch. Tokens without an
adapter are in no segment, so that nothing is added to theirs.

T packed tokens, N those of a segment, I inputs, O outputs, R rows of A.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nesa_node.engine.adapters.served_adapter import ServedAdapter, SpanLayout
from nesa_node.engine.kernels.linear import KernelLaunch
from nesa_node.engine.kernels.low_rank import SEGMENT_FIELDS, TABLE_FIELDS, LowRankFunctions
from nesa_node.engine.kernels.machine_code import KernelCall

NATIVE_MAX_TOKENS = 32
"""Tokens of a run up to which machine code computes its products."""
Int64s = list[ctypes.c_int64 | int]
_MIN_ITEMS = 64
_COUNT, _SEGMENTS, _TOKENS, _HIDDEN, _STRIDE = range(TABLE_FIELDS)
"""Fields of the table (`native/low_rank.py`)."""
_TENSOR_FIELD = 2
"""Field of both functions: the tensor that is read, or added to."""


@dataclass(frozen=True, slots=True)
class _TorchSegment:
    adapter: ServedAdapter
    tokens: slice | Tensor


class AdapterSegments:
    """The tokens of the running iteration by adapter. Not thread-safe: one thread owns it.

    Machine code reads a table at a fixed address, so that recorded steps serve any adapters.
    """

    def __init__(self, layout: SpanLayout) -> None:
        self.layout = layout
        self._table = (ctypes.c_int64 * TABLE_FIELDS)()
        self._segments = (ctypes.c_int64 * 0)()
        self._tokens = (ctypes.c_int64 * 0)()
        self._hidden = torch.empty(0, dtype=torch.float32)
        self._is_adapted = [False] * len(layout.linears)
        """Of each linear layer, whether machine code has anything to add to its outputs."""
        self._calls: dict[tuple[int, int, int], tuple[KernelCall, KernelCall]] = {}
        """By block, linear layer and number of threads, for tensors at any address."""
        self._torch_segments: list[_TorchSegment] = []
        self._adapters: list[ServedAdapter] = []
        """Keeps alive what the table points to."""

    @cached_property
    def _functions(self) -> LowRankFunctions | None:
        return self.layout.load_functions()

    @property
    def is_native(self) -> bool:
        """Whether runs of up to `NATIVE_MAX_TOKENS` tokens are computed by machine code."""
        return self._functions is not None

    def begin(self, runs: Iterable[tuple[ServedAdapter | None, int]]) -> None:
        """Begin an iteration of packed runs, each with its adapter and number of tokens."""
        few: dict[ServedAdapter, list[range]] = {}
        many: dict[ServedAdapter, list[range]] = {}
        start = 0
        for adapter, count in runs:
            if adapter is not None:
                is_few = self._functions is not None and count <= NATIVE_MAX_TOKENS
                tokens = range(start, start + count)
                (few if is_few else many).setdefault(adapter, []).append(tokens)
            start += count
        self._adapters = list(few)
        self._write_table(few)
        self._torch_segments = [
            _TorchSegment(adapter, self._as_index(ranges)) for adapter, ranges in many.items()
        ]

    def end(self) -> None:
        """Drop references to adapters, so that those that are given up can be freed."""
        self._adapters, self._torch_segments = [], []
        self._table[_COUNT] = 0
        self._is_adapted[:] = [False] * len(self._is_adapted)

    def add(self, block: int, linear: int, input_TI: Tensor, output_TO: Tensor) -> None:
        """Add the low-rank products of the input of a linear layer to its output, in place.

        `block` is the model's, `linear` an index in the layout. Both are contiguous, and have the
        layout's dtype and device. Rounds once more than a layer without an adapter.
        """
        if self._is_adapted[linear]:
            key = block, linear, torch.get_num_threads()
            if key not in self._calls:
                self._calls[key] = self._bind(block, linear)
            for call, tensor in zip(self._calls[key], (input_TI, output_TO), strict=True):
                call.set_field(_TENSOR_FIELD, tensor.data_ptr())
                call.run()
        for segment in self._torch_segments:
            _add_product(segment, block, linear, input_TI, output_TO)

    def bind(self, block: int, linear: int, input_TI: Tensor, output_TO: Tensor) -> KernelLaunch:
        """Return a call that does what `add` does, in any later iteration of short runs only.

        The caller keeps the tensors alive. Needs `is_native`.
        """
        calls = self._bind(block, linear)
        for call, tensor in zip(calls, (input_TI, output_TO), strict=True):
            call.set_field(_TENSOR_FIELD, tensor.data_ptr())
        shrink, expand = (call.run for call in calls)
        is_adapted = self._is_adapted

        def launch() -> None:
            if is_adapted[linear]:
                shrink()
                expand()

        return launch

    def _bind(self, block: int, linear: int) -> tuple[KernelCall, KernelCall]:
        """Return the two calls for a linear layer, whose tensors are set later."""
        assert self._functions is not None
        served, threads = self.layout.linears[linear], torch.get_num_threads()
        width = self.layout.num_fields * ctypes.sizeof(ctypes.c_int64)
        table = ctypes.addressof(self._table), self.layout.number_of(block, linear) * width
        return (
            self._functions.shrink.bind(*table, 0, served.in_features, threads=threads),
            self._functions.expand.bind(*table, 0, served.out_features, threads=threads),
        )

    def _write_table(self, few: dict[ServedAdapter, list[range]]) -> None:
        tokens: Int64s = [token for ranges in few.values() for tokens in ranges for token in tokens]
        stride = max((adapter.max_rows for adapter in few), default=0)
        self._reserve(len(few), len(tokens), len(tokens) * stride)
        self._tokens[: len(tokens)] = tokens
        segments: Int64s = []
        first = 0
        for adapter, ranges in few.items():
            end = first + sum(map(len, ranges))
            segments += ctypes.addressof(adapter.descriptors), first, end
            first = end
        self._segments[: len(segments)] = segments
        self._table[_COUNT], self._table[_STRIDE] = len(few), stride
        for linear in range(len(self._is_adapted)):
            self._is_adapted[linear] = any(linear in adapter.adapted_linears for adapter in few)

    def _reserve(self, segments: int, tokens: int, hidden: int) -> None:
        """Make room for so many, at addresses that the table tells."""
        if SEGMENT_FIELDS * segments > len(self._segments):
            self._segments = (ctypes.c_int64 * (SEGMENT_FIELDS * _round_up(segments)))()
            self._table[_SEGMENTS] = ctypes.addressof(self._segments)
        if tokens > len(self._tokens):
            self._tokens = (ctypes.c_int64 * _round_up(tokens))()
            self._table[_TOKENS] = ctypes.addressof(self._tokens)
        if hidden > len(self._hidden):
            self._hidden = torch.empty(_round_up(hidden), dtype=torch.float32)
            self._table[_HIDDEN] = self._hidden.data_ptr()

    def _as_index(self, ranges: Sequence[range]) -> slice | Tensor:
        whole = slice(ranges[0].start, ranges[-1].stop)
        if sum(map(len, ranges)) == whole.stop - whole.start:
            return whole
        return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).to(self.layout.device)


def _add_product(
    segment: _TorchSegment, block: int, linear: int, input_TI: Tensor, output_TO: Tensor
) -> None:
    """Add a segment's product by torch's operations, in the dtype of the tensors."""
    low_rank = segment.adapter.product_of(block, linear)
    if low_rank is None:
        return
    is_slice = isinstance(segment.tokens, slice)
    output_NO = output_TO[segment.tokens]  # a view of a slice, else a copy
    hidden_NR = torch.mm(input_TI[segment.tokens], low_rank.a_RI.t())
    for part in low_rank.parts:
        rows_NO = output_NO[:, part.start : part.start + part.count]
        hidden_Nr = hidden_NR[:, part.first : part.first + part.rank]
        rows_NO.addmm_(hidden_Nr, part.b_rO, alpha=part.scale)
    if not is_slice:
        output_TO[segment.tokens] = output_NO


def _round_up(items: int) -> int:
    return max(1 << (items - 1).bit_length(), _MIN_ITEMS)
