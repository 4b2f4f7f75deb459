"""The processor that code is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True)
class Processor:
    """LLVM's name and features of a processor, and its vector registers."""

    name: str
    features: str
    registers: int
    floats: int
    """Floats per register."""

    @classmethod
    def of_host(cls) -> Processor:
        features = llvm.get_host_cpu_features()
        registers, floats = 16, 4
        if features.get("avx512f"):
            registers, floats = 32, 16
        elif features.get("avx2"):
            floats = 8
        elif features.get("neon"):
            registers = 32
        return cls(llvm.get_host_cpu_name(), features.flatten(), registers, floats)
