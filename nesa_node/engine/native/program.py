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

from nesa_node.engine.native.code import constants
from nesa_node.engine.native.int8 import int8_product, int8_unpack
from nesa_node.engine.native.layer import activate, add_and_norm, attend, rotate
from nesa_node.engine.native.nf4 import nf4_product, nf4_unpack
from nesa_node.engine.native.processor import Processor
from nesa_node.engine.native.product import product
from nesa_node.engine.native.tiles import tiles

FUNCTIONS: dict[str, Callable[..., ir.Module]] = {
    "product": product,
    "int8_product": int8_product,
    "int8_unpack": int8_unpack,
    "nf4_product": nf4_product,
    "nf4_unpack": nf4_unpack,
    "add_and_norm": add_and_norm,
    "rotate": rotate,
    "attend": attend,
    "activate": activate,
    "tiles": tiles,
}


def compiled(functions: Sequence[Sequence[str | int]], processor: Processor) -> list[bytes]:
    """Return the position-independent machine code of each function.

    Raises `RuntimeError` if code refers to anything outside itself.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # ELF on every system, so that sections have known names.
    architecture, *_ = llvm.get_process_triple().split("-")
    target = llvm.Target.from_triple(f"{architecture}-unknown-linux-gnu")
    machine = target.create_target_machine(
        cpu=processor.name,
        features=processor.features,
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    return [
        _machine_code(FUNCTIONS[str(name)](*arguments, processor), machine)
        for name, *arguments in functions
    ]


def _machine_code(module: ir.Module, machine: llvm.TargetMachine) -> bytes:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    file = llvm.ObjectFileRef.from_data(machine.emit_object(parsed))
    sections = {section.name() or b"": section.data() for section in file.sections()}
    if {b".rela.text", b".rel.text"} & sections.keys():
        raise RuntimeError(f"{module.name} refers to what is outside its code")
    code: bytes = sections[b".text"]
    return code


if __name__ == "__main__":
    codes = compiled(json.load(sys.stdin), Processor.of_host())
    json.dump([base64.b64encode(each).decode() for each in (constants(), *codes)], sys.stdout)
