"""Compiler program: machine code for this processor of the functions named on standard input.

Input is JSON: a list of functions, each a key of `FUNCTIONS` with its arguments. Output is JSON in
base64: the constants, then the machine code of each. It is a process of its own because LLVM takes
75 MB and is needed for a fraction of a second.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence

import llvmlite.binding as llvm
from llvmlite import ir

from nesa_node.engine.kernels.native import decoder_ops, low_rank, matmul, ring_ops
from nesa_node.engine.kernels.native.function_builder import encode_constants
from nesa_node.engine.kernels.native.job_builder import Processor
from nesa_node.engine.kernels.native.linker import link
from nesa_node.engine.kernels.native.matmul import amx_matmul

FUNCTIONS: dict[str, Callable[..., ir.Module]] = {
    "product": matmul.matmul,
    "int8_product": matmul.int8_matmul,
    "int8_unpack": matmul.int8_dequantize,
    "nf4_product": matmul.nf4_matmul,
    "nf4_unpack": matmul.nf4_dequantize,
    "add_and_norm": decoder_ops.add_rms_norm,
    "rotate": decoder_ops.rope_and_store_kv,
    "attend": decoder_ops.paged_attention,
    "activate": decoder_ops.silu_and_mul,
    "tiles": amx_matmul,
    "lora_shrink": low_rank.lora_shrink,
    "lora_expand": low_rank.lora_expand,
    "ring_values": ring_ops.ring_values,
    "ring_coefficients": ring_ops.ring_coefficients,
    "ring_lift": ring_ops.ring_lift,
    "ring_divide": ring_ops.ring_divide,
    "ring_rotate": ring_ops.ring_rotate,
    "ring_multiply_sum": ring_ops.ring_multiply_sum,
}


def compile_functions(
    functions: Sequence[Sequence[str | int]], processor: Processor
) -> list[bytes]:
    """Return the position-independent machine code of each function.

    Raises `RuntimeError` if code refers to anything outside itself.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # ELF on every system, so that sections have known names.
    architecture, *_ = llvm.get_process_triple().split("-")
    target = llvm.Target.from_triple(f"{architecture}-unknown-linux-gnu")
    machine = target.create_target_machine(
        cpu=processor.name, features=processor.features, opt=3, reloc="pic", codemodel="small"
    )
    return [
        _compile_module(FUNCTIONS[str(name)](*arguments, processor), machine)
        for name, *arguments in functions
    ]


def _compile_module(module: ir.Module, machine: llvm.TargetMachine) -> bytes:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    try:
        return link(machine.emit_object(parsed))
    except ValueError as error:
        raise RuntimeError(f"{module.name} cannot be position-independent: {error}") from error


if __name__ == "__main__":
    codes = compile_functions(json.load(sys.stdin), Processor.of_host())
    json.dump(
        [base64.b64encode(each).decode() for each in (encode_constants(), *codes)], sys.stdout
    )
