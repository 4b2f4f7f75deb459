"""Products y = x W^T + b for few tokens.

Up to eight tokens, reading W bounds the time. It is read in memory order, a few rows at a time,
with a prefetch far ahead.

Products with quantized weights: int8 with a scale per row (Dettmers et al. 2022), and nf4.

Inputs are not quantized, unlike in LLM.int8(): a processor converts levels to float32 faster than
memory delivers them. T tokens, I inputs, O outputs, N blocks of nf4.

Products with nf4 weights: two per byte, the first in the upper half, each an index into 16
numbers that is scaled by the peak of its block of 64 (Dettmers et al. 2023, QLoRA, section 3).

One AVX-512 instruction gathers from 16 floats in a register, so that other processors are not
supported. T tokens, I inputs, O outputs, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import (
    BYTE,
    I32,
    I64,
    FunctionBuilder,
    Processor,
)

CACHE_LINE_BYTES = 64
"""Bytes of a cache line, read of each row per iteration."""
PREFETCH_BYTES = 8192
"""Prefetch distance in bytes. Measured: 4 to 16 KiB are equal, less is slower, and without prefetch
it is 0.7 x as fast."""

WEIGHT_FIELD, INPUT_FIELD, BIAS_FIELD, OUTPUT_FIELD, NUM_INPUTS_FIELD, NUM_OUTPUTS_FIELD = range(6)
"""Fields: W [O, I], x [T, I] in float32, b [O] in float32, y [T, O]; I and O."""


def matmul(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b for a fixed number of tokens.

    Rows of W must be whole cache lines. A token's result has the same bits for every T.
    """
    code = FunctionBuilder(f"product_{dtype}_{tokens}", dtype, processor)
    return build_matmul(code, tokens, code.load, code.item_bytes, lambda value, _: value)


def build_matmul(
    code: FunctionBuilder,
    tokens: int,
    load: Callable[[ir.Value], ir.Value],
    item_bytes: int,
    finish: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Module:
    """Build a product with any weight format.

    `load` loads a vector of weights, each of `item_bytes`, as float32. `finish(sum, row)` scales a
    row's sum.
    """
    at, rows = code.ir_builder, 2 if 2 * tokens + 3 <= code.processor.num_vector_registers else 1
    inputs, outputs = code.int_field(NUM_INPUTS_FIELD), code.int_field(NUM_OUTPUTS_FIELD)
    first, end, _ = code.thread_range(outputs, rows)
    # The last iteration starts early enough to be a whole one, and recomputes rows.
    latest = at.sub(outputs, I64(rows))

    def round_(row: ir.Value) -> None:
        begin = at.select(at.icmp_signed("<", row, latest), row, latest)
        weights = _WeightRows(load, item_bytes, begin, rows)
        sums = _build_sums(code, weights, inputs, tokens)
        for number, of_row in enumerate(sums):
            place = at.add(begin, I64(number))
            bias = code.load_float(code.address(code.pointer_field(BIAS_FIELD), place, 4))
            for token, lanes in enumerate(of_row):
                where = at.add(at.mul(I64(token), outputs), place)
                value = finish(code.horizontal_sum(lanes), place)
                code.store(
                    at.fadd(value, bias), code.address(code.pointer_field(OUTPUT_FIELD), where)
                )

    code.for_each(first, end, rows, round_)
    return code.finish()


@dataclass(frozen=True)
class _WeightRows:
    """Consecutive rows of weights, from `begin` on."""

    load: Callable[[ir.Value], ir.Value]
    item_bytes: int
    begin: ir.Value
    rows: int


def _build_sums(
    code: FunctionBuilder, weights: _WeightRows, inputs: ir.Value, tokens: int
) -> list[list[ir.Value]]:
    """Return, for each row and token, a vector of partial sums."""
    at, size, rows = code.ir_builder, weights.item_bytes, weights.rows
    starts = [
        code.address(
            code.pointer_field(WEIGHT_FIELD), at.mul(at.add(weights.begin, I64(row)), inputs), size
        )
        for row in range(rows)
    ]
    tensor = code.pointer_field(INPUT_FIELD)
    of_tokens = [code.address(tensor, at.mul(I64(token), inputs), 4) for token in range(tokens)]

    def step_(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        # Consecutive rows: prefetching ahead of the first covers those of the next iteration, too.
        ahead = at.mul(index, I64(rows * size))
        for row in range(rows):
            code.prefetch(
                code.address(
                    starts[0], at.add(ahead, I64(PREFETCH_BYTES + CACHE_LINE_BYTES * row)), 1
                )
            )
        for part in range(0, CACHE_LINE_BYTES // size, code.vector_floats):
            place = at.add(index, I64(part))
            lanes = [weights.load(code.address(start, place, size)) for start in starts]
            for token, values in enumerate(of_tokens):
                lane = code.load_float32(code.address(values, place, 4))
                for row, weight in enumerate(lanes):
                    each = row * tokens + token
                    sums[each] = code.multiply_add(weight, lane, sums[each])
        return sums

    sums = code.loop(
        I64(0), inputs, CACHE_LINE_BYTES // size, [code.zeros] * (rows * tokens), step_
    )
    return [sums[row * tokens : (row + 1) * tokens] for row in range(rows)]


LEVEL_SIZES_FIELD = NUM_OUTPUTS_FIELD + 1


def int8_matmul(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b with int8 weights.

    Fields: those of `matmul`, W in bytes; size of a level in each row [O] in float32. I must be
    whole cache lines. A token's result has the same bits for every T.
    """
    code = FunctionBuilder(f"int8_product_{dtype}_{tokens}", dtype, processor)

    def finish(value: ir.Value, row: ir.Value) -> ir.Value:
        return code.ir_builder.fmul(
            value, code.load_float(code.address(code.pointer_field(LEVEL_SIZES_FIELD), row, 4))
        )

    return build_matmul(code, tokens, code.load_int8, 1, finish)


def int8_dequantize(dtype: str, processor: Processor) -> ir.Module:
    """Build the dequantization of int8 weights.

    Fields: W [O, I] in bytes; size of a level in each row [O] in float32; weights [O, I] in the
    dtype; I, in whole cache lines; O.
    """
    code = FunctionBuilder(f"int8_unpack_{dtype}", dtype, processor)
    at, inputs = code.ir_builder, code.int_field(3)
    first, end, _ = code.thread_range(code.int_field(4))

    def of_row(row: ir.Value) -> None:
        step = code.broadcast(code.load_float(code.address(code.pointer_field(1), row, 4)))
        start = at.mul(row, inputs)

        def of_line(index: ir.Value) -> None:
            line = at.add(start, index)
            code.prefetch(
                code.address(code.pointer_field(WEIGHT_FIELD), at.add(line, I64(PREFETCH_BYTES)), 1)
            )
            for part in range(0, CACHE_LINE_BYTES, code.vector_floats):
                place = at.add(line, I64(part))
                level = code.load_int8(code.address(code.pointer_field(WEIGHT_FIELD), place, 1))
                code.store_half_away_from_zero(
                    at.fmul(level, step), code.address(code.pointer_field(2), place)
                )

        code.for_each(I64(0), inputs, CACHE_LINE_BYTES, of_line)

    code.for_each(first, end, 1, of_row)
    return code.finish()


NF4_BLOCK_SIZE = 64
NF4_PREFETCH_BYTES = 4096
NF4_PACKED_FIELD, NF4_ABSMAX_FIELD, NF4_CODEBOOK_FIELD = range(3)
"""Fields of both functions: packed weights, peaks [N] and the 16 numbers in float32."""


def nf4_matmul(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b with nf4 weights.

    Further fields: x [T, I] and b [O] in float32; y [T, O]; I; O. I must be whole blocks. A token's
    result has the same bits for every T.
    """
    code = _make_builder(f"nf4_product_{dtype}_{tokens}", dtype, processor)
    at = code.ir_builder
    inputs, outputs = code.int_field(6), code.int_field(7)
    numbers = code.load_float32(code.pointer_field(NF4_CODEBOOK_FIELD))
    xs = [
        code.address(code.pointer_field(3), at.mul(I64(token), inputs), 4)
        for token in range(tokens)
    ]
    first, end, _ = code.thread_range(outputs)

    def of_row(row: ir.Value) -> None:
        start = at.mul(row, inputs)
        packed = code.address(code.pointer_field(NF4_PACKED_FIELD), at.sdiv(start, I64(2)), 1)
        peaks = code.address(
            code.pointer_field(NF4_ABSMAX_FIELD), at.sdiv(start, I64(NF4_BLOCK_SIZE)), 4
        )

        def of_block(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            code.prefetch(
                code.address(packed, at.add(at.sdiv(index, I64(2)), I64(NF4_PREFETCH_BYTES)), 1)
            )
            peak = code.load_float(code.address(peaks, at.sdiv(index, I64(NF4_BLOCK_SIZE)), 4))
            of_tokens = [code.zeros] * tokens
            for part in range(0, NF4_BLOCK_SIZE, code.vector_floats):
                place = at.add(index, I64(part))
                weight = _load_codebook_values(code, packed, place, numbers)
                for token, x in enumerate(xs):
                    lane = code.load_float32(code.address(x, place, 4))
                    of_tokens[token] = code.multiply_add(weight, lane, of_tokens[token])
            spread = code.broadcast(peak)
            return [
                code.multiply_add(of_token, spread, sum_)
                for of_token, sum_ in zip(of_tokens, sums, strict=True)
            ]

        sums = code.loop(I64(0), inputs, NF4_BLOCK_SIZE, [code.zeros] * tokens, of_block)
        bias = code.load_float(code.address(code.pointer_field(4), row, 4))
        for token, lanes in enumerate(sums):
            where = at.add(at.mul(I64(token), outputs), row)
            code.store(
                at.fadd(code.horizontal_sum(lanes), bias),
                code.address(code.pointer_field(5), where),
            )

    code.for_each(first, end, 1, of_row)
    return code.finish()


def nf4_dequantize(dtype: str, processor: Processor) -> ir.Module:
    """Build the dequantization of nf4 weights.

    Further fields: weights in the dtype; N.
    """
    code = _make_builder(f"nf4_unpack_{dtype}", dtype, processor)
    at = code.ir_builder
    packed, numbers = (
        code.pointer_field(NF4_PACKED_FIELD),
        code.load_float32(code.pointer_field(NF4_CODEBOOK_FIELD)),
    )
    first, end, _ = code.thread_range(code.int_field(4))

    def of_block(block: ir.Value) -> None:
        start = at.mul(block, I64(NF4_BLOCK_SIZE))
        code.prefetch(
            code.address(packed, at.add(at.sdiv(start, I64(2)), I64(NF4_PREFETCH_BYTES)), 1)
        )
        peak = code.broadcast(
            code.load_float(code.address(code.pointer_field(NF4_ABSMAX_FIELD), block, 4))
        )
        for part in range(0, NF4_BLOCK_SIZE, code.vector_floats):
            place = at.add(start, I64(part))
            weight = at.fmul(_load_codebook_values(code, packed, place, numbers), peak)
            code.store(weight, code.address(code.pointer_field(3), place))

    code.for_each(first, end, 1, of_block)
    return code.finish()


def _make_builder(name: str, dtype: str, processor: Processor) -> FunctionBuilder:
    if processor.vector_floats != CACHE_LINE_BYTES // 4:
        raise RuntimeError(f"{name} needs registers of 512 bits")
    return FunctionBuilder(name, dtype, processor)


def _load_codebook_values(
    code: FunctionBuilder, packed: ir.Value, place: ir.Value, numbers: ir.Value
) -> ir.Value:
    """Return the unscaled values of the 16 weights from index `place` on."""
    at = code.ir_builder
    wide = ir.VectorType(I64, code.vector_floats // 2)
    narrow = ir.VectorType(BYTE, code.vector_floats // 2)
    where = code.address(packed, at.sdiv(place, I64(2)), 1)
    pairs = at.zext(at.load(where, align=1, typ=narrow), wide)
    # Each byte into two lanes; the permutation uses only the last four bits of an index.
    upper, lower = (
        function(pairs, ir.Constant(wide, [by] * (code.vector_floats // 2)))
        for function, by in ((at.lshr, 4), (at.shl, 32))
    )
    indices = at.bitcast(at.or_(upper, lower), ir.VectorType(I32, code.vector_floats))
    return code.permute(numbers, indices)
