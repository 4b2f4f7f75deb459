"""Machine code with constants behind it."""

from __future__ import annotations

import numpy as np
import pytest
from llvmlite import ir

from nesa_node.engine.kernels.machine_code import load_functions
from nesa_node.engine.kernels.native import compiler
from nesa_node.engine.kernels.native.job_builder import I32, I64, JobBuilder, Processor


def build(outside: bool, processor: Processor) -> ir.Module:
    """`outside`: calls a function that its file does not hold."""
    code = JobBuilder("spread", 4, processor)
    at = code.ir_builder
    out = code.field(0)
    if outside:
        foreign = ir.Function(code.module, ir.FunctionType(ir.VoidType(), []), name="elsewhere")
        at.call(foreign, [])
    kind = ir.VectorType(I32, 8)
    at.store(ir.Constant(kind, [3, 1, 4, 1, 5, 9, 2, 6]), code.address(out, I64(0)), align=4)
    return code.finish()


def test_code_finds_the_constants_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.FUNCTIONS, "spread", lambda processor: build(False, processor))
    (code,) = compiler.compile_functions([["spread"]], Processor.of_host())
    (function,) = load_functions(b"", [code])
    out = np.zeros(8, np.int32)
    function(out.ctypes.data)
    assert out.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]


def test_code_that_refers_to_what_is_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.FUNCTIONS, "spread", lambda processor: build(True, processor))
    with pytest.raises(RuntimeError, match="outside its file"):
        compiler.compile_functions([["spread"]], Processor.of_host())
