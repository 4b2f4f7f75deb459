"""What is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True)
class Processor:
    """LLVM's names, and the vector registers."""

    name: str
    features: str
    registers: int
    floats: int
    """That many in a register."""
    multiplies_bytes: bool = False
    """Sums products of bytes in registers of 512 bits (VNNI)."""

    @classmethod
    def of_host(cls) -> Processor:
        features = llvm.get_host_cpu_features()
        registers, floats, multiplies_bytes = 16, 4, False
        if features.get("avx512f"):
            registers, floats = 32, 16
            multiplies_bytes = bool(features.get("avx512vnni"))
        elif features.get("avx2"):
            floats = 8
        elif features.get("neon"):
            registers = 32
        name = llvm.get_host_cpu_name()
        return cls(name, features.flatten(), registers, floats, multiplies_bytes)
