"""Low-rank products y += s B (A x) of tokens with different adapters, for few tokens.

Tokens are in segments, one for each adapter (Punica's SGMV, Chen et al. 2023, section 4). What a
segment needs of an adapter lies in its descriptors, so that a recorded step serves any adapters:

- table: S, addresses of the segments [S, 3], token indices [N] and hidden rows [N, stride], stride;
- segment: address of an adapter's descriptors, first and last index + 1 in the token indices;
- descriptor of a linear layer: address of A [R, I], R, address of the scales [R], number of parts,
  then for each part address of B^T in blocks, first row of A, r, first output, O.

B^T is stored in blocks of `BLOCK_OUTPUTS` outputs, then of `SMALL_BLOCK_OUTPUTS`, each [r, its
outputs], so that memory is read in order: rows of O outputs are read at half the speed. All are
int64. A, B and activations have the dtype; scales, hidden rows and sums are float32. A token's
result has the same bits in any segment and on any number of threads.

S segments, N tokens with an adapter, R rows of A, r those of a part, I inputs, O outputs of a part.
R is a multiple of `ROWS_AT_ONCE`; I, first outputs and O are multiples of `SMALL_BLOCK_OUTPUTS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import FunctionBuilder
from nesa_node.engine.kernels.native.job_builder import I64, POINTER, Processor
from nesa_node.engine.kernels.native.matmul import CACHE_LINE_BYTES, PREFETCH_BYTES

ROWS_AT_ONCE = 4
"""Rows of A that are multiplied with a token at a time."""
VECTORS_AT_ONCE = 4
"""Vectors of outputs that a token's hidden row is multiplied with at a time."""
BLOCK_OUTPUTS, SMALL_BLOCK_OUTPUTS = 64, 16
"""Outputs of a block of B^T, and of those that hold what is left over."""
SEGMENT_FIELDS, DESCRIPTOR_FIELDS, PART_FIELDS = 3, 4, 5


def lora_shrink(dtype: str, processor: Processor) -> ir.Module:
    """Build hidden = s A x of each token in a segment.

    Fields: table; offset of the layer's descriptor in bytes; x [T, I]; I.
    """
    code = FunctionBuilder(f"lora_shrink_{dtype}", dtype, processor)
    at = code.ir_builder
    table = _Table.load(code)
    x, inputs = code.field(2), code.field(3, I64)

    def multiply(number: ir.Value, row: ir.Value, a: ir.Value, scales: ir.Value, far: bool) -> None:
        """Multiply a token, the first of its segment if `far`, with `ROWS_AT_ONCE` rows of A."""
        token = code.load_int64(table.tokens, number)
        values = code.address(x, at.mul(token, inputs))
        starts = [
            code.address(a, at.mul(at.add(row, I64(line)), inputs)) for line in range(ROWS_AT_ONCE)
        ]
        line_bytes = ROWS_AT_ONCE * code.item_bytes
        with code.loop(inputs, code.vector_floats, [code.zeros] * ROWS_AT_ONCE) as loop:
            if far:
                ahead = at.mul(loop.index, I64(line_bytes))
                for line in range(0, line_bytes * code.vector_floats, CACHE_LINE_BYTES):
                    code.prefetch(starts[0], at.add(ahead, I64(PREFETCH_BYTES + line)))
            lanes = code.load(values, loop.index)
            for line, start in enumerate(starts):
                weight = code.load(start, loop.index)
                loop.values[line] = code.multiply_add(weight, lanes, loop.values[line])
        hidden = code.address(table.hidden, at.mul(number, table.stride), 4)
        for line, sums in enumerate(loop.values):
            place = at.add(row, I64(line))
            value = at.fmul(code.horizontal_sum(sums), code.load_float(scales, place))
            code.store_float32(value, code.address(hidden, place, 4))

    with table.for_each_segment() as (descriptor, first, end):
        a, scales = (_load_pointer(code, descriptor, index) for index in (0, 2))
        begin, last, _ = code.thread_range(code.load_int64(descriptor, I64(1)), ROWS_AT_ONCE)
        with code.for_each(last, ROWS_AT_ONCE, first=begin) as row:
            multiply(first, row, a, scales, True)
            # The rows are in the nearest cache by now.
            with code.for_each(end, first=at.add(first, I64(1))) as number:
                multiply(number, row, a, scales, False)
    return code.finish()


def lora_expand(dtype: str, processor: Processor) -> ir.Module:
    """Build y += B hidden of each token in a segment, rounded once.

    Fields: table; offset of the layer's descriptor in bytes; y [T, O of all parts]; its width.
    """
    code = FunctionBuilder(f"lora_expand_{dtype}", dtype, processor)
    at, floats = code.ir_builder, code.vector_floats
    table = _Table.load(code)
    y, width = code.field(2), code.field(3, I64)

    def multiply(number: ir.Value, block: ir.Value, part: _Part, size: int, far: bool) -> None:
        """Add to a token's outputs of a block, the first of its segment if `far`."""
        token = code.load_int64(table.tokens, number)
        outputs = at.add(at.mul(token, width), at.add(part.start, block))
        hidden = at.add(at.mul(number, table.stride), part.first)
        weights = code.address(part.b, at.mul(block, part.rank))
        for first in range(0, size, VECTORS_AT_ONCE * floats):
            steps = range(first, min(first + VECTORS_AT_ONCE * floats, size), floats)
            places = [at.add(outputs, I64(step)) for step in steps]
            with code.loop(part.rank, 1, [code.load(y, place) for place in places]) as loop:
                value = code.broadcast(code.load_float(table.hidden, at.add(hidden, loop.index)))
                line = code.address(weights, at.mul(loop.index, I64(size)))
                if far:
                    nbytes = len(steps) * floats * code.item_bytes
                    for offset in range(0, nbytes, CACHE_LINE_BYTES):
                        code.prefetch(line, PREFETCH_BYTES + first * code.item_bytes + offset)
                for index, step in enumerate(steps):
                    weight = code.load(line, step)
                    loop.values[index] = code.multiply_add(weight, value, loop.values[index])
            for place, lane in zip(places, loop.values, strict=True):
                code.store(lane, y, place)

    with (
        table.for_each_segment() as (descriptor, first, end),
        code.for_each(code.load_int64(descriptor, I64(3))) as index,
    ):
        part = _Part.load(code, descriptor, index)
        begin, last, _ = code.thread_range(part.count, BLOCK_OUTPUTS)
        whole = at.sub(last, at.srem(at.sub(last, begin), I64(BLOCK_OUTPUTS)))
        sizes = (BLOCK_OUTPUTS, begin, whole), (SMALL_BLOCK_OUTPUTS, whole, last)
        for size, start, stop in sizes:
            with code.for_each(stop, size, first=start) as block:
                multiply(first, block, part, size, True)
                with code.for_each(end, first=at.add(first, I64(1))) as number:
                    multiply(number, block, part, size, False)
    return code.finish()


@dataclass(frozen=True)
class _Table:
    code: FunctionBuilder
    offset: ir.Value
    count: ir.Value
    segments: ir.Value
    tokens: ir.Value
    hidden: ir.Value
    stride: ir.Value

    @classmethod
    def load(cls, code: FunctionBuilder) -> _Table:
        table = code.field(0)
        segments, tokens, hidden = (_load_pointer(code, table, index) for index in (1, 2, 3))
        count, stride = (code.load_int64(table, I64(index)) for index in (0, 4))
        return cls(code, code.field(1, I64), count, segments, tokens, hidden, stride)

    @contextmanager
    def for_each_segment(self) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
        """Loop over segments; yields the layer's descriptor, and the range of token indices."""
        code = self.code
        with code.for_each(self.count) as index:
            segment = code.address(self.segments, index, 8 * SEGMENT_FIELDS)
            descriptor = code.address(_load_pointer(code, segment, 0), self.offset, 1)
            first, end = (code.load_int64(segment, I64(field)) for field in (1, 2))
            yield descriptor, first, end


@dataclass(frozen=True)
class _Part:
    b: ir.Value
    first: ir.Value
    rank: ir.Value
    start: ir.Value
    count: ir.Value

    @classmethod
    def load(cls, code: FunctionBuilder, descriptor: ir.Value, index: ir.Value) -> _Part:
        parts = code.address(descriptor, 8 * DESCRIPTOR_FIELDS, 1)
        part = code.address(parts, index, 8 * PART_FIELDS)
        numbers = [code.load_int64(part, I64(field)) for field in range(1, PART_FIELDS)]
        return cls(_load_pointer(code, part, 0), *numbers)


def _load_pointer(code: FunctionBuilder, base: ir.Value, index: int) -> ir.Value:
    return code.ir_builder.load(code.address(base, index, 8), align=8, typ=POINTER)
