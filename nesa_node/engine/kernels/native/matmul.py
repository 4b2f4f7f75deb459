"""Products y = x W^T + b for few tokens, with weights in the dtype, in int8 or in nf4.

Up to eight tokens, reading W bounds the time. It is read in memory order, a few rows at a time,
with a prefetch far ahead.

int8 has a scale per row (Dettmers et al. 2022). Inputs are not quantized, unlike in LLM.int8(): a
processor converts levels to float32 faster than memory delivers them.

nf4 has two weights per byte, the first in the upper half, each an index into 16 numbers that is
scaled by the peak of its block of 64 (Dettmers et al. 2023, QLoRA, section 3). One AVX-512
instruction gathers from 16 floats in a register, so that other processors are not supported.

In bfloat16 AMX serves up to 32 tokens. A tile of W has 16 rows of 64 bytes, or 32 columns; it is
read once and multiplied with those columns of 16 or 32 tokens, while the next rows are prefetched
in memory order. Sums are float32.

T tokens, I inputs, O outputs, N blocks of nf4. A token's result has the same bits for every T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import (
    TILE_ROW_BYTES,
    TILE_ROWS,
    FunctionBuilder,
)
from nesa_node.engine.kernels.native.job_builder import BYTE, I32, I64, POINTER, Processor

CACHE_LINE_BYTES = 64
"""Bytes of a cache line, read of each row per iteration."""
PREFETCH_BYTES = 8192
"""Prefetch distance in bytes. Measured: 4 to 16 KiB are equal, less is slower, and without prefetch
it is 0.7 x as fast."""
NF4_BLOCK_SIZE = 64
NF4_PREFETCH_BYTES = 4096

WEIGHT_FIELD, INPUT_FIELD, BIAS_FIELD, OUTPUT_FIELD, NUM_INPUTS_FIELD, NUM_OUTPUTS_FIELD = range(6)
"""Fields of products: W [O, I], x [T, I] in float32, b [O] in float32, y [T, O]; I and O."""
SCALES_FIELD, CODEBOOK_FIELD = 6, 7
"""Further fields with quantized weights, in float32: level sizes [O] of int8; peaks [N] and the 16
numbers of nf4."""


def matmul(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b for a fixed number of tokens. Rows of W must be whole cache lines."""
    code = FunctionBuilder(f"product_{dtype}_{tokens}", dtype, processor)
    return _build_matmul(code, tokens, code.load, code.item_bytes, lambda value, _: value)


def int8_matmul(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b with int8 weights. I must be whole cache lines."""
    code = FunctionBuilder(f"int8_product_{dtype}_{tokens}", dtype, processor)

    def scale(value: ir.Value, row: ir.Value) -> ir.Value:
        return code.ir_builder.fmul(value, code.load_float(code.field(SCALES_FIELD), row))

    return _build_matmul(code, tokens, code.load_int8, 1, scale)


def _build_matmul(
    code: FunctionBuilder,
    tokens: int,
    load: Callable[[ir.Value, ir.Value], ir.Value],
    item_bytes: int,
    scale: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Module:
    """Build a product with weights of `item_bytes` that `load` loads as a vector of float32.

    `scale(sum, row)` scales a row's sum.
    """
    at = code.ir_builder
    rows = 2 if 2 * tokens + 3 <= code.processor.num_vector_registers else 1
    step = CACHE_LINE_BYTES // item_bytes
    inputs, outputs = code.field(NUM_INPUTS_FIELD, I64), code.field(NUM_OUTPUTS_FIELD, I64)
    with code.for_each_block(outputs, rows) as begin:
        starts = []
        for row in range(rows):
            weight = code.field(WEIGHT_FIELD)
            first = at.mul(at.add(begin, I64(row)), inputs)
            starts.append(code.address(weight, first, item_bytes))
        of_tokens = _input_rows(code, inputs, tokens)
        with code.loop(inputs, step, [code.zeros] * (rows * tokens)) as loop:
            sums = loop.values
            # Consecutive rows: prefetching ahead of the first covers those of the next iteration.
            ahead = at.mul(loop.index, I64(rows * item_bytes))
            for row in range(rows):
                further = I64(PREFETCH_BYTES + CACHE_LINE_BYTES * row)
                code.prefetch(starts[0], at.add(ahead, further))
            for part in range(0, step, code.vector_floats):
                place = at.add(loop.index, I64(part))
                lanes = [load(start, place) for start in starts]
                for token, values in enumerate(of_tokens):
                    lane = code.load_float32(values, place)
                    for row, weight in enumerate(lanes):
                        each = row * tokens + token
                        sums[each] = code.multiply_add(weight, lane, sums[each])
        for number in range(rows):
            row = at.add(begin, I64(number))
            of_row = loop.values[number * tokens : (number + 1) * tokens]
            _store_outputs(code, row, of_row, outputs, scale)
    return code.finish()


def _input_rows(code: FunctionBuilder, inputs: ir.Value, tokens: int) -> list[ir.Value]:
    tensor = code.field(INPUT_FIELD)
    return [
        code.address(tensor, code.ir_builder.mul(I64(token), inputs), 4) for token in range(tokens)
    ]


def _store_outputs(
    code: FunctionBuilder,
    row: ir.Value,
    sums: Sequence[ir.Value],
    outputs: ir.Value,
    scale: Callable[[ir.Value, ir.Value], ir.Value],
) -> None:
    """Store a row's outputs, one for each token, from vectors of partial sums."""
    at = code.ir_builder
    bias = code.load_float(code.field(BIAS_FIELD), row)
    for token, lanes in enumerate(sums):
        where = at.add(at.mul(I64(token), outputs), row)
        value = scale(code.horizontal_sum(lanes), row)
        code.store(at.fadd(value, bias), code.field(OUTPUT_FIELD), where)


def int8_dequantize(dtype: str, processor: Processor) -> ir.Module:
    """Build the dequantization of int8 weights.

    Fields: W [O, I] in bytes; size of a level in each row [O] in float32; weights [O, I] in the
    dtype; I, in whole cache lines; O.
    """
    code = FunctionBuilder(f"int8_unpack_{dtype}", dtype, processor)
    at, inputs = code.ir_builder, code.field(3, I64)
    with code.for_each_of_thread(code.field(4, I64)) as row:
        step = code.broadcast(code.load_float(code.field(1), row))
        start = at.mul(row, inputs)
        with code.for_each(inputs, CACHE_LINE_BYTES) as index:
            line = at.add(start, index)
            code.prefetch(code.field(0), at.add(line, I64(PREFETCH_BYTES)))
            for part in range(0, CACHE_LINE_BYTES, code.vector_floats):
                place = at.add(line, I64(part))
                level = code.load_int8(code.field(0), place)
                weight = at.fmul(level, step)
                code.store_half_away_from_zero(weight, code.field(2), place)
    return code.finish()


NF4_INPUT_ORDER = tuple(place + half for place in range(8) for half in (0, 8))
"""Order of each 16 inputs of nf4 products: that in which eight packed bytes are unpacked fastest,
by shifting their two halves side by side."""


def nf4_matmul(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b with nf4 weights. I must be whole blocks, x is in `NF4_INPUT_ORDER`."""
    code = _make_nf4_builder(f"nf4_product_{dtype}_{tokens}", dtype, processor)
    at = code.ir_builder
    inputs, outputs = code.field(NUM_INPUTS_FIELD, I64), code.field(NUM_OUTPUTS_FIELD, I64)
    numbers = code.load_float32(code.field(CODEBOOK_FIELD))
    of_tokens = _input_rows(code, inputs, tokens)
    with code.for_each_of_thread(outputs) as row:
        start = at.mul(row, inputs)
        packed = code.address(code.field(WEIGHT_FIELD), at.sdiv(start, I64(2)), 1)
        first_block = at.sdiv(start, I64(NF4_BLOCK_SIZE))
        peaks = code.address(code.field(SCALES_FIELD), first_block, 4)
        with code.loop(inputs, NF4_BLOCK_SIZE, [code.zeros] * tokens) as loop:
            half = at.sdiv(loop.index, I64(2))
            code.prefetch(packed, at.add(half, I64(NF4_PREFETCH_BYTES)))
            peak = code.load_float(peaks, at.sdiv(loop.index, I64(NF4_BLOCK_SIZE)))
            sums = [code.zeros] * tokens
            for part in range(0, NF4_BLOCK_SIZE, code.vector_floats):
                place = at.add(loop.index, I64(part))
                weight = _load_interleaved_values(code, packed, place, numbers)
                for token, values in enumerate(of_tokens):
                    lane = code.load_float32(values, place)
                    sums[token] = code.multiply_add(weight, lane, sums[token])
            spread = code.broadcast(peak)
            for token, of_block in enumerate(sums):
                loop.values[token] = code.multiply_add(of_block, spread, loop.values[token])
        _store_outputs(code, row, loop.values, outputs, lambda value, _: value)
    return code.finish()


def nf4_dequantize(dtype: str, processor: Processor) -> ir.Module:
    """Build the dequantization of nf4 weights.

    Fields: packed weights; peaks [N] and the 16 numbers in float32; weights in the dtype; N.
    """
    code = _make_nf4_builder(f"nf4_unpack_{dtype}", dtype, processor)
    at, packed = code.ir_builder, code.field(0)
    numbers = code.load_float32(code.field(2))
    with code.for_each_of_thread(code.field(4, I64)) as block:
        start = at.mul(block, I64(NF4_BLOCK_SIZE))
        code.prefetch(packed, at.add(at.sdiv(start, I64(2)), I64(NF4_PREFETCH_BYTES)))
        peak = code.broadcast(code.load_float(code.field(1), block))
        for part in range(0, NF4_BLOCK_SIZE, code.vector_floats):
            place = at.add(start, I64(part))
            weight = at.fmul(_load_codebook_values(code, packed, place, numbers), peak)
            code.store(weight, code.field(3), place)
    return code.finish()


def _make_nf4_builder(name: str, dtype: str, processor: Processor) -> FunctionBuilder:
    if processor.vector_floats != CACHE_LINE_BYTES // 4:
        raise RuntimeError(f"{name} needs registers of 512 bits")
    return FunctionBuilder(name, dtype, processor)


def _load_interleaved_values(
    code: FunctionBuilder, packed: ir.Value, place: ir.Value, numbers: ir.Value
) -> ir.Value:
    """Return the unscaled values of the 16 weights from index `place` on, in `NF4_INPUT_ORDER`."""
    at = code.ir_builder
    eight_bytes = at.load(code.address(packed, at.sdiv(place, I64(2)), 1), align=1, typ=I64)
    wide, lanes = ir.VectorType(I64, 8), ir.VectorType(I32, 16)
    first = at.insert_element(ir.Constant(wide, ir.Undefined), eight_bytes, I32(0))
    eightfold = at.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, 8), [0] * 8))
    halves = at.bitcast(eightfold, lanes)
    # A byte's upper half is the weight of an even index.
    shifts = [8 * (place // 2) + 4 * (1 - place % 2) for place in range(8) for _ in range(2)]
    indices = at.lshr(halves, ir.Constant(lanes, shifts))
    return _look_up(code, numbers, indices)


def _look_up(code: FunctionBuilder, numbers: ir.Value, indices: ir.Value) -> ir.Value:
    """Sixteen of 16 floats, by the last four bits of each index."""
    permute = "llvm.x86.avx512.permvar.sf.512"
    return code.call_intrinsic(permute, code.vector, numbers, indices)


def _load_codebook_values(
    code: FunctionBuilder, packed: ir.Value, place: ir.Value, numbers: ir.Value
) -> ir.Value:
    """Return the unscaled values of the 16 weights from index `place` on."""
    at = code.ir_builder
    wide = ir.VectorType(I64, code.vector_floats // 2)
    narrow = ir.VectorType(BYTE, code.vector_floats // 2)
    where = code.address(packed, at.sdiv(place, I64(2)), 1)
    pairs = at.zext(at.load(where, align=1, typ=narrow), wide)
    # Each byte into two lanes.
    upper = at.lshr(pairs, ir.Constant(wide, [4] * wide.count))
    lower = at.shl(pairs, ir.Constant(wide, [32] * wide.count))
    indices = at.bitcast(at.or_(upper, lower), ir.VectorType(I32, code.vector_floats))
    return _look_up(code, numbers, indices)


TILE_LINE_BYTES = TILE_ROW_BYTES
TILE_BYTES = TILE_ROWS * TILE_LINE_BYTES
TILE_INPUTS = TILE_LINE_BYTES // 2
"""Inputs in a row of a tile."""
WEIGHT_TILES = 2
"""Tiles of W, one below the other, for which x is read once."""
ROWS_PER_BLOCK = WEIGHT_TILES * TILE_ROWS
FIRST_WEIGHT_TILE, FIRST_INPUT_TILE = 4, 6
"""First tile for W, and for x; lower ones hold sums."""
ALIGNMENT = 64

(
    WEIGHT_FIELD,
    INPUT_PAIRS_FIELD,
    BIAS_FIELD,
    OUTPUT_FIELD,
    NUM_INPUTS_FIELD,
    NUM_OUTPUTS_FIELD,
    NUM_TOKENS_FIELD,
) = range(7)
"""Fields: W [O, I], x as pairs [I / 2, 16 x wide, 2], b [O] in float32, y [T, O]; I, O, T."""


def amx_matmul(dtype: str, token_tiles: int, processor: Processor) -> ir.Module:
    """Build the product for up to 16 x `token_tiles` (1 or 2) tokens.

    I is a multiple of 32, O at least 32. A token's result has the same bits for every T.
    """
    code = FunctionBuilder(f"tiles_{token_tiles}", dtype, processor)
    at = code.ir_builder
    stack = at.alloca(ir.ArrayType(BYTE, WEIGHT_TILES * token_tiles * TILE_BYTES))
    stack.align = ALIGNMENT
    # llvmlite's pointer is typed and would accept no other type in stores.
    sums = at.inttoptr(at.ptrtoint(stack, I64), POINTER)
    code.configure_tiles()
    inputs, outputs = code.field(NUM_INPUTS_FIELD, I64), code.field(NUM_OUTPUTS_FIELD, I64)
    row_bytes = at.mul(inputs, I64(2))
    with code.for_each_block(outputs, ROWS_PER_BLOCK) as begin:
        weights = code.address(code.field(WEIGHT_FIELD), at.mul(begin, inputs))
        following = code.address(weights, at.mul(inputs, I64(ROWS_PER_BLOCK)))
        for tile in range(WEIGHT_TILES * token_tiles):
            code.call_tile_instruction("tilezero", tile)
        with code.for_each(inputs, TILE_INPUTS) as index:
            of_tokens = code.address(
                code.field(INPUT_PAIRS_FIELD), index, TILE_ROWS * token_tiles * 2
            )
            for column in range(token_tiles):
                place = code.address(of_tokens, column * TILE_LINE_BYTES, 1)
                line_bytes = I64(TILE_LINE_BYTES * token_tiles)
                code.call_tile_instruction(
                    "tileloadd64", FIRST_INPUT_TILE + column, place, line_bytes
                )
            for tall in range(WEIGHT_TILES):
                weight_tile = FIRST_WEIGHT_TILE + tall
                place = code.address(weights, at.add(index, at.mul(inputs, I64(tall * TILE_ROWS))))
                code.call_tile_instruction("tileloadd64", weight_tile, place, row_bytes)
                for column in range(token_tiles):
                    sum_tile = tall * token_tiles + column
                    code.call_tile_instruction(
                        "tdpbf16ps", sum_tile, weight_tile, FIRST_INPUT_TILE + column
                    )
            for line in range(ROWS_PER_BLOCK):
                ahead = at.mul(index, I64(ROWS_PER_BLOCK * 2))
                code.prefetch(following, at.add(ahead, I64(TILE_LINE_BYTES * line)))
        for tile in range(WEIGHT_TILES * token_tiles):
            tall, column = divmod(tile, token_tiles)
            place = code.address(sums, tile * TILE_BYTES, 1)
            code.call_tile_instruction("tilestored64", tile, place, I64(TILE_LINE_BYTES))
            rows = at.add(begin, I64(tall * TILE_ROWS))
            _store_tile(code, place, rows, column * TILE_ROWS)
    # Tiles in use slow down every context switch.
    code.call_tile_instruction("tilerelease")
    return code.finish()


def _store_tile(code: FunctionBuilder, sums: ir.Value, rows: ir.Value, first_token: int) -> None:
    """Add the bias to sums [16 rows, 16 tokens] and store them in the output."""
    at = code.ir_builder
    bias = code.load_float32(code.field(BIAS_FIELD), rows)
    tokens = at.sub(code.field(NUM_TOKENS_FIELD, I64), I64(first_token))
    some = at.select(at.icmp_signed("<", tokens, I64(TILE_ROWS)), tokens, I64(TILE_ROWS))
    with code.for_each(some) as token:
        values: ir.Value = ir.Constant(code.vector, ir.Undefined)
        for row in range(TILE_ROWS):
            number = code.load_float(sums, at.add(token, I64(row * TILE_ROWS)))
            values = at.insert_element(values, number, I32(row))
        where = at.mul(at.add(token, I64(first_token)), code.field(NUM_OUTPUTS_FIELD, I64))
        biased = at.fadd(values, bias)
        code.store(biased, code.field(OUTPUT_FIELD), at.add(where, rows))
