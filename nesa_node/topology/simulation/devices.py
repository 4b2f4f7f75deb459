"""Devices of synthetic swarms: memory, bandwidth, and the time that a block takes on each.

Memory, memory bandwidth and dense half-precision arithmetic are from the makers' data sheets
(NVIDIA: the boards' product pages and the Turing, Ampere, Ada and Hopper white papers, tensor cores
with accumulation in float32; Pascal has none, so its float32 rate; Apple: the MacBook Pro's
technical specifications; the laptop's CPU: two channels of DDR4-3200, four cores with AVX2 at
3 GHz). Two assumptions turn these peaks into times: a decode step reads every weight once, at 60 %
of the memory bandwidth, plus 0.2 ms to launch; a prefill computes at 40 % of the peak. Inference
engines reach that in general; these machines were not measured. Planners compare devices with each
other, so only the ratios matter.

Legend: N nodes, B blocks, S possible starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.snapshot import NodeState

GB = 10**9
READ_EFFICIENCY = 0.6
COMPUTE_EFFICIENCY = 0.4
LAUNCH_S = 0.0002
CACHE_MEMORY_FRACTION = 0.1
"""Fraction of a node's memory that is reserved for KV caches."""

BYTES_PER_PARAMETER: Mapping[str, float] = {
    "none": 2.0,
    "int8": 1.01,
    "llm_int8": 1.01,
    "nf4": 0.5625,
}
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


_WITHOUT_OWN_MEMORY = ("laptop-cpu", "m2max")
"""Devices that compute in the machine's memory."""


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


MAX_LOAD = 0.95
TARGET_REPLICAS = 2.5
"""Copies of the model that the swarm's memory holds; enough to hold every block twice."""


def draw_devices(count: int, residential_share: float, rng: np.random.Generator) -> list[Device]:
    """Draw devices by their `draw_weight`; the fraction `residential_share` of them residential
    ones.
    """
    home_N = rng.random(count) < residential_share
    drawn: list[Device] = [DEVICES["a100"]] * count
    for home in (True, False):
        kinds = [kind for kind in DEVICES.values() if kind.residential is home]
        weights = np.array([kind.draw_weight for kind in kinds])
        rows = np.flatnonzero(home_N == home)
        numbers = rng.choice(len(kinds), size=len(rows), p=weights / weights.sum())
        for row, number in zip(rows, numbers, strict=True):
            drawn[int(row)] = kinds[int(number)]
    return drawn


def fit_devices(
    devices: Sequence[Device], num_blocks: int, block: Block
) -> tuple[list[Device], str]:
    """Devices and the quantization with which they hold the model `TARGET_REPLICAS` times.

    The first of float16, int8 and nf4 that suffices. If none does, the smallest devices become
    A100s, until nf4 suffices or all are A100s.
    """
    fitted = list(devices)
    for quantization in BYTES_PER_PARAMETER:
        if _total_blocks(fitted, num_blocks, block, quantization) >= TARGET_REPLICAS * num_blocks:
            return fitted, quantization
    for row in sorted(range(len(fitted)), key=lambda row: fitted[row].memory_bytes):
        fitted[row] = DEVICES["a100"]
        if _total_blocks(fitted, num_blocks, block, "nf4") >= TARGET_REPLICAS * num_blocks:
            break
    return fitted, "nf4"


def _total_blocks(
    devices: Sequence[Device], num_blocks: int, block: Block, quantization: str
) -> int:
    return sum(min(num_blocks, device.max_blocks(block, quantization)) for device in devices)


def draw_nodes(
    devices: Sequence[Device],
    quantization: str,
    spans: Sequence[Span],
    places_N2: Floats,
    block: Block,
    rng: np.random.Generator,
) -> tuple[NodeState, ...]:
    """Draw node states that hold `spans`, with random load, reliability, speed and uptime."""
    count = len(devices)
    home_N = np.array([device.residential for device in devices])
    load_N = MAX_LOAD * rng.beta(1.2, 2.5, size=count)
    taken_N = np.clip(load_N + rng.normal(0.0, 0.1, count), 0.0, 1.0)
    luck_N = rng.lognormal(0.0, 0.1, size=count)
    # Means 0.93 and 0.99: 0.95 in a swarm of which 70 % are in homes.
    reliability_N = np.where(home_N, rng.beta(13.0, 1.0, count), rng.beta(99.0, 1.0, count))
    uptime_s_N = rng.exponential(np.where(home_N, 8.0, 240.0)) * 3600.0
    location_N2 = places_N2 + rng.normal(0.0, 0.5, (count, 2))
    nodes = []
    for row, (device, span) in enumerate(zip(devices, spans, strict=True)):
        blocks = len(span)
        luck = float(luck_N[row])
        cache_bytes = device.memory_bytes * CACHE_MEMORY_FRACTION
        weight_bytes = block.weight_bytes(quantization) * blocks
        cache_tokens = int(cache_bytes / (block.cache_bytes * blocks))
        used_bytes = weight_bytes + float(taken_N[row]) * cache_bytes
        nodes.append(
            _with_memory(
                device,
                used_bytes,
                NodeState(
                    PeerId(f"n{row:04d}"),
                    span,
                    dtype="float16",
                    quantization=quantization,
                    prefill_tokens_per_s=luck * device.prefill_block_tokens_per_s(block) / blocks,
                    decode_tokens_per_s=luck
                    / (device.decode_block_s(block, quantization) * blocks),
                    free_cache_tokens=int(cache_tokens * (1.0 - taken_N[row])),
                    total_cache_tokens=cache_tokens,
                    load=float(load_N[row]),
                    uptime_s=float(uptime_s_N[row]),
                    max_blocks=max(blocks, device.max_blocks(block, quantization)),
                    reliability=float(reliability_N[row]),
                    location=(float(location_N2[row, 0]), float(location_N2[row, 1])),
                ),
            )
        )
    return tuple(nodes)


def _with_memory(device: Device, used_bytes: float, node: NodeState) -> NodeState:
    total = device.memory_bytes
    free = max(total - int(used_bytes), 0)
    if device.name in _WITHOUT_OWN_MEMORY:
        return replace(node, cpu_memory_total_bytes=total, cpu_memory_free_bytes=free)
    return replace(node, gpu_memory_total_bytes=total, gpu_memory_free_bytes=free)


MAX_SPAN_FRACTION = 0.5
"""Maximum fraction of the model per node, so that chains have several hops; more with few nodes."""


def choose_spans(
    max_blocks_N: Ints,
    num_blocks: int,
    rng: np.random.Generator,
    holders_B: Ints | None = None,
) -> list[Span]:
    """Choose a span for every node, as without a planner; at most `max_blocks_N`, never empty.

    `holders_B` counts the present holders of each block, zero if None. The longest spans are chosen
    first: the window with the most unheld blocks, then with the most blocks of one holder. Once all
    blocks have two holders, windows are random.
    """
    count = len(max_blocks_N)
    share = (
        MAX_SPAN_FRACTION if holders_B is not None else max(MAX_SPAN_FRACTION, 2.5 / max(1, count))
    )
    cap = max(1, round(num_blocks * min(1.0, share)))
    length_N = np.clip(max_blocks_N, 1, cap)
    # Nodes offer 70 to 100 % of their memory.
    length_N = np.maximum(1, np.ceil(length_N * rng.uniform(0.7, 1.0, count))).astype(np.int64)
    holders_B = np.zeros(num_blocks, dtype=np.int64) if holders_B is None else holders_B.copy()
    spans = [Span(0, 0)] * count
    for node in np.argsort(-length_N, kind="stable"):
        start = _choose_start(holders_B, int(length_N[node]), rng)
        end = start + int(length_N[node])
        holders_B[start:end] += 1
        spans[int(node)] = Span(start, end)
    return spans


def _choose_start(holders_B: Ints, length: int, rng: np.random.Generator) -> int:
    starts = len(holders_B) - length + 1
    if holders_B.min() >= 2:
        return int(rng.integers(starts))
    need_B = np.where(holders_B == 0, len(holders_B) + 1.0, np.where(holders_B == 1, 1.0, 0.0))
    sums = np.concatenate(([0.0], np.cumsum(need_B)))
    need_S = sums[length:] - sums[:-length]
    best = np.flatnonzero(need_S == need_S.max())
    # A window that leaves a narrow gap wastes a later node: prefer windows at the edge of held
    # blocks, which are the first and the last of the best.
    return int(best[0] if rng.random() < 0.5 else best[-1])
