"""Products y = x W^T + b in bfloat16 for up to 32 tokens, by AMX tiles of 16 rows of 64 bytes.

A tile of W has 16 rows and 32 columns; it is read once and multiplied with those columns of 16 or
32 tokens, while the next rows are prefetched in memory order. Sums are float32.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.native.code import (
    BYTE,
    I32,
    I64,
    POINTER,
    TILE_ROW_BYTES,
    TILE_ROWS,
    Code,
)
from nesa_node.engine.native.processor import Processor

LINE = TILE_ROW_BYTES
TILE_BYTES = TILE_ROWS * LINE
NUMBERS = LINE // 2
"""Inputs in a row of a tile."""
TALL = 2
"""Tiles of W, one below the other, for which x is read once."""
ROWS = TALL * TILE_ROWS
OF_WEIGHT, OF_TOKENS = 4, 6
"""First tile for W, and for x; lower ones hold sums."""
ALIGNMENT = 64

WEIGHT, TURNED, BIAS, OUTPUT, INPUTS, OUTPUTS, TOKENS = range(7)
"""Fields: W [O, I], x as pairs [I / 2, 16 x wide, 2], b [O] in float32, y [T, O]; I, O, T."""


def tiles(dtype: str, wide: int, processor: Processor) -> ir.Module:
    """Build the product for up to 16 x `wide` (1 or 2) tokens.

    I is a multiple of 32, O at least 32. A token's result has the same bits for every T.
    """
    code = Code(f"tiles_{wide}", dtype, processor)
    at = code.at
    sums = _room(code, TALL * wide * TILE_BYTES)
    code.begin_tiles()
    inputs, outputs = code.number(INPUTS), code.number(OUTPUTS)
    first, end, _ = code.share(outputs, ROWS)
    latest = at.sub(outputs, I64(ROWS))
    row_bytes = at.mul(inputs, I64(2))

    def block(row: ir.Value) -> None:
        begin = at.select(at.icmp_signed("<", row, latest), row, latest)
        weights = code.address(code.pointer(WEIGHT), at.mul(begin, inputs))
        following = code.address(weights, at.mul(inputs, I64(ROWS)))
        for tile in range(TALL * wide):
            code.tile("tilezero", tile)

        def multiply(index: ir.Value) -> None:
            of_tokens = code.address(code.pointer(TURNED), index, TILE_ROWS * wide * 2)
            for column in range(wide):
                place = code.address(of_tokens, I64(column * LINE), 1)
                code.tile("tileloadd64", OF_TOKENS + column, place, I64(LINE * wide))
            for tall in range(TALL):
                place = code.address(weights, at.add(index, at.mul(inputs, I64(tall * TILE_ROWS))))
                code.tile("tileloadd64", OF_WEIGHT + tall, place, row_bytes)
                for column in range(wide):
                    code.tile(
                        "tdpbf16ps", tall * wide + column, OF_WEIGHT + tall, OF_TOKENS + column
                    )
            for line in range(ROWS):
                code.prefetch(
                    code.address(
                        following, at.add(at.mul(index, I64(ROWS * 2)), I64(LINE * line)), 1
                    )
                )

        code.each(I64(0), inputs, NUMBERS, multiply)
        for tall in range(TALL):
            for column in range(wide):
                tile = tall * wide + column
                place = code.address(sums, I64(tile * TILE_BYTES), 1)
                code.tile("tilestored64", tile, place, I64(LINE))
                rows = at.add(begin, I64(tall * TILE_ROWS))
                _write(code, place, rows, column * TILE_ROWS)

    code.each(first, end, ROWS, block)
    code.end_tiles()
    return code.return_()


def _write(code: Code, sums: ir.Value, rows: ir.Value, first_token: int) -> None:
    """Add the bias to sums [16 rows, 16 tokens] and store them in the output."""
    at = code.at
    bias = code.load_wide(code.address(code.pointer(BIAS), rows, 4))
    tokens = at.sub(code.number(TOKENS), I64(first_token))
    some = at.select(at.icmp_signed("<", tokens, I64(TILE_ROWS)), tokens, I64(TILE_ROWS))

    def of_token(token: ir.Value) -> None:
        values: ir.Value = ir.Constant(code.vector, ir.Undefined)
        for row in range(TILE_ROWS):
            place = code.address(sums, at.add(token, I64(row * TILE_ROWS)), 4)
            values = at.insert_element(values, code.load_float(place), I32(row))
        where = at.mul(at.add(token, I64(first_token)), code.number(OUTPUTS))
        place = code.address(code.pointer(OUTPUT), at.add(where, rows))
        code.store(at.fadd(values, bias), place)

    code.each(I64(0), some, 1, of_token)


def _room(code: Code, size: int) -> ir.Value:
    """Allocate aligned memory on the stack."""
    room = code.at.alloca(ir.ArrayType(BYTE, size))
    room.align = ALIGNMENT
    # llvmlite's pointer is typed and would accept no other type in stores.
    return code.at.inttoptr(code.at.ptrtoint(room, I64), POINTER)
