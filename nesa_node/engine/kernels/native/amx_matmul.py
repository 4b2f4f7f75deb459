"""Products y = x W^T + b in bfloat16 for up to 32 tokens, by AMX tiles of 16 rows of 64 bytes.

A tile of W has 16 rows and 32 columns; it is read once and multiplied with those columns of 16 or
32 tokens, while the next rows are prefetched in memory order. Sums are float32.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.kernels.native.function_builder import (
    BYTE,
    I32,
    I64,
    POINTER,
    TILE_ROW_BYTES,
    TILE_ROWS,
    FunctionBuilder,
    Processor,
)

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
