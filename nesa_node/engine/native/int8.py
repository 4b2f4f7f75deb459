"""Products with quantized weights: int8 with a scale per row (Dettmers et al. 2022), and nf4.

Inputs are not quantized, unlike in LLM.int8(): a processor converts levels to float32 faster than
memory delivers them. T tokens, I inputs, O outputs, N blocks of nf4.
"""

from __future__ import annotations

from llvmlite import ir

from nesa_node.engine.native.code import I64, Code
from nesa_node.engine.native.processor import Processor
from nesa_node.engine.native.product import AHEAD, LINE, OUTPUTS, WEIGHT, product_of

STEPS = OUTPUTS + 1


def int8_product(dtype: str, tokens: int, processor: Processor) -> ir.Module:
    """Build y = x W^T + b with int8 weights.

    Fields: those of `product`, W in bytes; size of a level in each row [O] in float32. I must be
    whole cache lines. A token's result has the same bits for every T.
    """
    code = Code(f"int8_product_{dtype}_{tokens}", dtype, processor)

    def finish(value: ir.Value, row: ir.Value) -> ir.Value:
        return code.at.fmul(value, code.load_float(code.address(code.pointer(STEPS), row, 4)))

    return product_of(code, tokens, code.load_bytes, 1, finish)


def int8_unpack(dtype: str, processor: Processor) -> ir.Module:
    """Build the dequantization of int8 weights.

    Fields: W [O, I] in bytes; size of a level in each row [O] in float32; weights [O, I] in the
    dtype; I, in whole cache lines; O.
    """
    code = Code(f"int8_unpack_{dtype}", dtype, processor)
    at, inputs = code.at, code.number(3)
    first, end, _ = code.share(code.number(4))

    def of_row(row: ir.Value) -> None:
        step = code.spread(code.load_float(code.address(code.pointer(1), row, 4)))
        start = at.mul(row, inputs)

        def of_line(index: ir.Value) -> None:
            line = at.add(start, index)
            code.prefetch(code.address(code.pointer(WEIGHT), at.add(line, I64(AHEAD)), 1))
            for part in range(0, LINE, code.floats):
                place = at.add(line, I64(part))
                level = code.load_bytes(code.address(code.pointer(WEIGHT), place, 1))
                code.store_number(at.fmul(level, step), code.address(code.pointer(2), place))

        code.each(I64(0), inputs, LINE, of_line)

    code.each(first, end, 1, of_row)
    return code.return_()
