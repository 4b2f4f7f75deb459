"""LLM.int8() for T tokens at a time: inputs split into levels and outliers, and their product.

Dettmers et al. 2022 (LLM.int8()), section 3: y = s c / 127^2 (levels of x) (levels of W)^T, where
s is the largest size among a token's inputs and c that of a row of weights, and what is beyond the
threshold is left out of s and multiplied as it is. float32 is rounded to float16 before, in which
the paper's inputs are. The paper takes whole columns apart, of all
tokens that come together; here it is each token's own outliers, so that a token's result has the
same bits whatever it is batched with.

Processors that multiply bytes (VNNI) sum levels exactly, and add the outliers by chunks of columns
that have any. On others x is what levels stand for, in float32, and one sum is all.

T tokens, I inputs, O outputs, C = I / 64 chunks.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.native.code import BYTE, FLOAT, I32, I64, Code
from nesa_node.engine.native.processor import Processor
from nesa_node.engine.native.product import AHEAD, LINE

CHUNK = LINE
"""Columns of a chunk: a line of weights."""

LEVELS, WIDE, SCALES, CHUNKS, COUNTS = range(1, 6)
"""Fields of both functions: levels + 128 [T, I] in bytes, outliers or all of x [T, I] and s / 127
[T] in float32, chunks with outliers [T, C] and how many there are [T] in int64."""


def int8_split(dtype: str, processor: Processor) -> ir.Module:
    """Fields: x [T, I]; levels, wide, scales, chunks, counts; T; I. I must be whole chunks."""
    code = Code(f"int8_split_{dtype}", dtype, processor)
    at = code.at
    x, tokens, size = code.pointer(0), code.number(6), code.number(7)

    def of_token(token: ir.Value) -> None:
        row = at.mul(token, size)

        def look(index: ir.Value, most: list[ir.Value]) -> list[ir.Value]:
            value = code.as_half(code.load(code.address(x, at.add(row, index))))
            size = at.select(_beyond(code, value), code.zeros, _size(code, value))
            return [code.largest(size, most[0])]

        [most] = code.loop(I64(0), size, code.floats, [code.constant("smallest")], look)
        largest = code.spread(code.peak(most))
        # As torch divides a number by a tensor: where a level lies halfway, the last bit decides.
        upward = at.fmul(at.fdiv(code.constant("one"), largest), code.constant("levels"))
        downward = at.fdiv(largest, code.constant("levels"))
        code.store_wide(
            at.extract_element(downward, I32(0)), code.address(code.pointer(SCALES), token, 4)
        )
        chunks = code.address(code.pointer(CHUNKS), at.mul(token, at.sdiv(size, I64(CHUNK))), 8)

        def split(start: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            any_beyond = ir.Constant(ir.IntType(code.floats), 0)
            for part in range(0, CHUNK, code.floats):
                place = at.add(row, at.add(start, I64(part)))
                value = code.load(code.address(x, place))
                half = code.as_half(value)
                beyond = _beyond(code, half)
                any_beyond = at.or_(any_beyond, at.bitcast(beyond, any_beyond.type))
                kept = at.select(beyond, code.zeros, half)
                level = code.nearest(at.fmul(kept, upward))
                wide = code.address(code.pointer(WIDE), place, 4)
                if processor.multiplies_bytes:
                    code.store_wide(at.select(beyond, value, code.zeros), wide)
                    number = at.fptosi(level, ir.VectorType(I32, code.floats))
                    bytes_ = at.trunc(
                        at.add(number, code.constant("middle byte")),
                        ir.VectorType(BYTE, code.floats),
                    )
                    at.store(bytes_, code.address(code.pointer(LEVELS), place, 1), align=1)
                else:
                    code.store_wide(at.select(beyond, value, at.fmul(level, downward)), wide)
            at.store(at.sdiv(start, I64(CHUNK)), code.address(chunks, found[0], 8), align=8)
            has = at.icmp_unsigned("!=", any_beyond, any_beyond.type(0))
            return [at.add(found[0], at.zext(has, I64))]

        [count] = code.loop(I64(0), size, CHUNK, [I64(0)], split)
        at.store(count, code.address(code.pointer(COUNTS), token, 8), align=8)

    code.each(I64(0), tokens, 1, of_token)
    return code.return_()


def int8_product(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """I must be whole chunks.

    Fields: W [O, I] in bytes; what `int8_split` made; c / 127 [O] and b [O] in float32; y [T, O];
    I; O.
    """
    code = Code(f"int8_product_{dtype}_{tokens}", dtype, processor)
    at = code.at
    rows = 2 if 2 * tokens + 5 <= processor.registers else 1
    inputs, outputs = code.number(9), code.number(10)
    first, end, _ = code.share(outputs, rows)
    # The last round begins early enough to be whole.
    latest = at.sub(outputs, I64(rows))

    def round_(row: ir.Value) -> None:
        begin = at.select(at.icmp_signed("<", row, latest), row, latest)
        places = [at.add(begin, I64(number)) for number in range(rows)]
        weights = [code.address(code.pointer(0), at.mul(place, inputs), 1) for place in places]
        sums = (_of_levels if processor.multiplies_bytes else _of_all)(
            code, weights, inputs, tokens
        )
        for number, place in enumerate(places):
            scale = code.load_float(code.address(code.pointer(6), place, 4))
            bias = code.load_float(code.address(code.pointer(7), place, 4))
            for token in range(tokens):
                value = at.fadd(at.fmul(sums[number * tokens + token], scale), bias)
                where = at.add(at.mul(I64(token), outputs), place)
                code.store(value, code.address(code.pointer(8), where))

    code.each(first, end, rows, round_)
    return code.return_()


def _of_levels(
    code: Code, weights: list[ir.Value], inputs: ir.Value, tokens: int
) -> list[ir.Value]:
    """Of each row and token x W^T without the row's scale."""
    at, rows = code.at, len(weights)
    bytes_ = ir.VectorType(BYTE, LINE)
    middle = at.bitcast(code.constant("middle bytes"), bytes_)
    lines = [
        code.address(code.pointer(LEVELS), at.mul(I64(token), inputs), 1) for token in range(tokens)
    ]

    def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        _prefetch(code, weights, index)
        values = [at.load(code.address(line, index, 1), align=1, typ=bytes_) for line in lines]
        for row, weight in enumerate(weights):
            line = at.load(code.address(weight, index, 1), align=1, typ=bytes_)
            # Last of each row: what 128, which levels are stored with, adds to every sum.
            for each, value in enumerate([*values, middle]):
                number = row * (tokens + 1) + each
                sums[number] = code.add_byte_products(sums[number], value, line)
        return sums

    nothing = ir.Constant(ir.VectorType(I32, code.floats), [0] * code.floats)
    sums = code.loop(I64(0), inputs, LINE, [nothing] * (rows * (tokens + 1)), step)
    of_outliers = [_of_outliers(code, weights, inputs, token) for token in range(tokens)]
    results = []
    for row in range(rows):
        *of_tokens, extra = sums[row * (tokens + 1) : (row + 1) * (tokens + 1)]
        for token, lanes in enumerate(of_tokens):
            scale = code.load_float(code.address(code.pointer(SCALES), I64(token), 4))
            levels = at.sitofp(code.sum(at.sub(lanes, extra)), FLOAT)
            results.append(at.fadd(at.fmul(levels, scale), of_outliers[token][row]))
    return results


def _of_outliers(
    code: Code, weights: list[ir.Value], inputs: ir.Value, token: int
) -> list[ir.Value]:
    """A token's outliers times each of these rows."""
    at = code.at
    of_token = at.sdiv(at.mul(I64(token), inputs), I64(CHUNK))
    chunks = code.address(code.pointer(CHUNKS), of_token, 8)
    wide = code.address(code.pointer(WIDE), at.mul(I64(token), inputs), 4)
    count = code.load_number(code.pointer(COUNTS), I64(token))

    def step(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        start = at.mul(code.load_number(chunks, number), I64(CHUNK))
        return _chunk(code, weights, [wide], start, sums)

    sums = code.loop(I64(0), count, 1, [code.zeros] * len(weights), step)
    return [code.total(lanes) for lanes in sums]


def _of_all(code: Code, weights: list[ir.Value], inputs: ir.Value, tokens: int) -> list[ir.Value]:
    """As `_of_levels`."""
    at = code.at
    wides = [
        code.address(code.pointer(WIDE), at.mul(I64(token), inputs), 4) for token in range(tokens)
    ]

    def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        _prefetch(code, weights, index)
        return _chunk(code, weights, wides, index, sums)

    sums = code.loop(I64(0), inputs, CHUNK, [code.zeros] * (len(weights) * tokens), step)
    return [code.total(lanes) for lanes in sums]


def _chunk(
    code: Code,
    weights: list[ir.Value],
    wides: list[ir.Value],
    start: ir.Value,
    sums: list[ir.Value],
) -> list[ir.Value]:
    """Add to the sum of each row and token what these columns are in float32."""
    at = code.at
    for part in range(0, CHUNK, code.floats):
        place = at.add(start, I64(part))
        rows = [code.load_bytes(code.address(weight, place, 1)) for weight in weights]
        for token, wide in enumerate(wides):
            lane = code.load_wide(code.address(wide, place, 4))
            for row, weight in enumerate(rows):
                each = row * len(wides) + token
                sums[each] = code.multiply_add(weight, lane, sums[each])
    return sums


def _prefetch(code: Code, weights: list[ir.Value], index: ir.Value) -> None:
    """These rows lie one after another: what comes after them is read in its own order, too."""
    ahead = code.at.mul(index, I64(len(weights)))
    for row in range(len(weights)):
        code.prefetch(code.address(weights[0], code.at.add(ahead, I64(AHEAD + LINE * row)), 1))


def _size(code: Code, value: ir.Value) -> ir.Value:
    return code.largest(value, code.at.fsub(code.zeros, value))


def _beyond(code: Code, value: ir.Value) -> ir.Value:
    """Which of these are outliers; what is no number is one, so that it is not lost."""
    return code.at.fcmp_unordered(">=", _size(code, value), code.constant("threshold"))
