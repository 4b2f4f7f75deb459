"""Products y = x W^T + b for few tokens.

Up to eight tokens, reading W bounds the time. It is read in memory order, a few rows at a time,
with a prefetch far ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import I64, FunctionBuilder, Processor

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
