"""Products with nf4 weights: two per byte, the first in the upper half, each an index into 16
numbers that is scaled by the peak of its block of 64 (Dettmers et al. 2023, QLoRA, section 3).

One AVX-512 instruction gathers from 16 floats in a register, so that other processors are not
supported. T tokens, I inputs, O outputs, N blocks.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.native.code import BYTE, I32, I64, Code
from nesa_node.engine.native.processor import Processor
from nesa_node.engine.native.product import LINE

BLOCK = 64
AHEAD = 4096
PACKED, PEAKS, NUMBERS = range(3)
"""Fields of both functions: packed weights, peaks [N] and the 16 numbers in float32."""


def nf4_product(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b with nf4 weights.

    Further fields: x [T, I] and b [O] in float32; y [T, O]; I; O. I must be whole blocks. A token's
    result has the same bits for every T.
    """
    code = _code(f"nf4_product_{dtype}_{tokens}", dtype, processor)
    at = code.at
    inputs, outputs = code.number(6), code.number(7)
    numbers = code.load_wide(code.pointer(NUMBERS))
    xs = [code.address(code.pointer(3), at.mul(I64(token), inputs), 4) for token in range(tokens)]
    first, end, _ = code.share(outputs)

    def of_row(row: ir.Value) -> None:
        start = at.mul(row, inputs)
        packed = code.address(code.pointer(PACKED), at.sdiv(start, I64(2)), 1)
        peaks = code.address(code.pointer(PEAKS), at.sdiv(start, I64(BLOCK)), 4)

        def of_block(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            code.prefetch(code.address(packed, at.add(at.sdiv(index, I64(2)), I64(AHEAD)), 1))
            peak = code.load_float(code.address(peaks, at.sdiv(index, I64(BLOCK)), 4))
            of_tokens = [code.zeros] * tokens
            for part in range(0, BLOCK, code.floats):
                place = at.add(index, I64(part))
                weight = _picked(code, packed, place, numbers)
                for token, x in enumerate(xs):
                    lane = code.load_wide(code.address(x, place, 4))
                    of_tokens[token] = code.multiply_add(weight, lane, of_tokens[token])
            spread = code.spread(peak)
            return [
                code.multiply_add(of_token, spread, sum_)
                for of_token, sum_ in zip(of_tokens, sums, strict=True)
            ]

        sums = code.loop(I64(0), inputs, BLOCK, [code.zeros] * tokens, of_block)
        bias = code.load_float(code.address(code.pointer(4), row, 4))
        for token, lanes in enumerate(sums):
            where = at.add(at.mul(I64(token), outputs), row)
            code.store(at.fadd(code.total(lanes), bias), code.address(code.pointer(5), where))

    code.each(first, end, 1, of_row)
    return code.return_()


def nf4_unpack(dtype: str, processor: Processor) -> ir.Module:
    """Build the dequantization of nf4 weights.

    Further fields: weights in the dtype; N.
    """
    code = _code(f"nf4_unpack_{dtype}", dtype, processor)
    at = code.at
    packed, numbers = code.pointer(PACKED), code.load_wide(code.pointer(NUMBERS))
    first, end, _ = code.share(code.number(4))

    def of_block(block: ir.Value) -> None:
        start = at.mul(block, I64(BLOCK))
        code.prefetch(code.address(packed, at.add(at.sdiv(start, I64(2)), I64(AHEAD)), 1))
        peak = code.spread(code.load_float(code.address(code.pointer(PEAKS), block, 4)))
        for part in range(0, BLOCK, code.floats):
            place = at.add(start, I64(part))
            weight = at.fmul(_picked(code, packed, place, numbers), peak)
            code.store(weight, code.address(code.pointer(3), place))

    code.each(first, end, 1, of_block)
    return code.return_()


def _code(name: str, dtype: str, processor: Processor) -> Code:
    if processor.floats != LINE // 4:
        raise RuntimeError(f"{name} needs registers of 512 bits")
    return Code(name, dtype, processor)


def _picked(code: Code, packed: ir.Value, place: ir.Value, numbers: ir.Value) -> ir.Value:
    """Return the unscaled values of the 16 weights from index `place` on."""
    at = code.at
    wide = ir.VectorType(I64, code.floats // 2)
    narrow = ir.VectorType(BYTE, code.floats // 2)
    where = code.address(packed, at.sdiv(place, I64(2)), 1)
    pairs = at.zext(at.load(where, align=1, typ=narrow), wide)
    # Each byte into two lanes; the permutation uses only the last four bits of an index.
    upper, lower = (
        function(pairs, ir.Constant(wide, [by] * (code.floats // 2)))
        for function, by in ((at.lshr, 4), (at.shl, 32))
    )
    indices = at.bitcast(at.or_(upper, lower), ir.VectorType(I32, code.floats))
    return code.picked(numbers, indices)
