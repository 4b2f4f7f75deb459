"""Devices of synthetic swarms: memory, bandwidth, and the time that a block takes on each.

Memory, memory bandwidth and dense half-precision arithmetic are from the makers' data sheets
(NVIDIA: the boards' product pages and the Turing, Ampere, Ada and Hopper white papers, tensor cores
with accumulation in float32; Pascal has none, so its float32 rate; Apple: the MacBook Pro's
technical specifications; the laptop's CPU: two channels of DDR4-3200, four cores with AVX2 at
3 GHz). Two assumptions turn these peaks into times: a decode step reads every weight once, at 60 %
of the memory bandwidth, plus 0.2 ms to launch; a prefill computes at 40 % of the peak. Inference
engines reach that in general; these machines were not measured. Planners compare devices with each
other, so only the ratios matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nesa_node.core.errors import ConfigError

GB = 10**9
READ_EFFICIENCY = 0.6
COMPUTE_EFFICIENCY = 0.4
LAUNCH_S = 0.0002
CACHE_MEMORY_FRACTION = 0.1
"""Fraction of a node's memory that is reserved for KV caches."""

BYTES_PER_PARAMETER: Mapping[str, float] = {"none": 2.0, "int8": 1.01, "nf4": 0.5625}
"""Bytes per weight by `NodeState.quantization`, scales included; "none" is float16."""


@dataclass(frozen=True, slots=True)
class Block:
    """Size of one block of a model; `cache_bytes` and `hidden_bytes` are per token."""

    parameters: int
    cache_bytes: int
    hidden_bytes: int

    def weight_bytes(self, quantization: str = "none") -> float:
        return self.parameters * BYTES_PER_PARAMETER[quantization]


LLAMA_70B = Block(parameters=855_654_400, cache_bytes=4096, hidden_bytes=16_384)
"""The default block: hidden 8192, feed-forward 28672, 64 query and 8 KV heads. 80 such blocks are
Llama 2 70B."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of machine. `draw_weight` is its relative frequency among residential or other
    devices.
    """

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    flops: float
    residential: bool
    draw_weight: float

    def decode_block_s(self, block: Block = LLAMA_70B, quantization: str = "none") -> float:
        """Seconds that one token takes through one block."""
        reading_s = block.weight_bytes(quantization) / (READ_EFFICIENCY * self.read_bytes_per_s)
        return reading_s + LAUNCH_S

    def prefill_block_tokens_per_s(self, block: Block = LLAMA_70B) -> float:
        """Tokens/s through one block, for long prompts."""
        return COMPUTE_EFFICIENCY * self.flops / (2 * block.parameters)

    def max_blocks(
        self, block: Block = LLAMA_70B, quantization: str = "none", memory_fraction: float = 1.0
    ) -> int:
        """How many blocks fit into the fraction `given` of the memory, less the KV cache."""
        room = self.memory_bytes * memory_fraction * (1 - CACHE_MEMORY_FRACTION)
        return int(room // block.weight_bytes(quantization))


def _device(
    name: str, memory_gb: float, read_gb_per_s: float, tflops: float, home: bool, share: float
) -> Device:
    return Device(name, int(memory_gb * GB), read_gb_per_s * GB, tflops * 1e12, home, share)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("laptop-cpu", 16, 51.2, 0.38, True, 1),
        _device("gtx1060", 6, 192, 4.4, True, 1),
        _device("gtx1080ti", 11, 484, 11.3, True, 1),
        _device("rtx2080ti", 11, 616, 53.8, True, 1),
        _device("rtx3060", 12, 360, 25.5, True, 2),
        _device("rtx3080", 10, 760, 59.5, True, 1),
        _device("rtx3090", 24, 936, 71, True, 3),
        _device("rtx4090", 24, 1008, 165, True, 2),
        _device("m2max", 64, 400, 13.6, True, 1),
        _device("t4", 16, 320, 65, False, 2),
        _device("v100", 16, 900, 125, False, 1),
        _device("a10", 24, 600, 125, False, 2),
        _device("l4", 24, 300, 121, False, 2),
        _device("a6000", 48, 768, 155, False, 1),
        _device("a100", 80, 2039, 312, False, 2),
        _device("h100", 80, 3350, 989, False, 1),
    )
}


def find_device(name: str) -> Device:
    """Find a device by name, ignoring case, spaces and underscores; `ConfigError` if unknown."""
    found = DEVICES.get(name.lower().replace(" ", "").replace("_", ""))
    if found is None:
        raise ConfigError(f"no device is called {name!r}; there are {', '.join(sorted(DEVICES))}")
    return found
