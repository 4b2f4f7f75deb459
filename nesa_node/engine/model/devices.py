"""Choice of the torch device that a name stands for.

Free memory of a device, how many blocks fit into it, and how it is released.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from nesa_node.core.errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from nesa_node.core.settings.choices import QuantType
from nesa_node.core.span import Span
from nesa_node.engine.kernels.linear import trim_malloc_heap
from nesa_node.engine.model.loading import embedder_and_head_names
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton

_DEVICE_TYPES = ("cpu", "cuda", "mps")


def choose_device(name: str | torch.device) -> torch.device:
    """Return the device named; `auto` is the first GPU, or the CPU.

    Raises `ConfigError` for a device that this machine, or this build of torch, does not have.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in _DEVICE_TYPES:
            raise RuntimeError(f"{device.type} is not supported here")
    except RuntimeError as error:
        raise ConfigError(
            f"device {name}: there is no such device here; give auto, cpu, cuda, cuda:N or mps"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name}: {torch.cuda.device_count()} CUDA devices are here; use cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps: this machine or this build of torch has none; use cpu")
    return device


# Kept free for activations, for the largest tensor while it is converted, and for other processes.
RESERVE_FRACTION = 0.1
RESERVE_BYTES = 256 << 20
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Number of `blocks` that fit, each with its share of the KV cache."""

    blocks: int
    free_bytes: int
    bytes_per_block: int
    cache_bytes_per_block: int


def free_memory_bytes(device: torch.device | str, *, cgroup: Path = CGROUP_ROOT) -> int:
    """Return the free bytes of a device: of the GPU, or of the machine or container."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(psutil.virtual_memory().available, _cgroup_free_bytes(cgroup))


def compute_block_bytes(
    checkpoint: Checkpoint, dtype: torch.dtype, quant_type: QuantType = "none"
) -> tuple[int, ...]:
    """Return the bytes of each block's weights in memory.

    Raises `CorruptCheckpointError`, and `UnsupportedModelError` for layers that nf4 cannot hold.
    """
    skeleton = Skeleton(checkpoint)
    return tuple(
        skeleton.nbytes(skeleton.block_names(Span(index, index + 1)), dtype, quant_type)
        for index in range(checkpoint.num_blocks)
    )


def cache_bytes_per_token(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the KV cache bytes of one token in one block."""
    heads = checkpoint.family.cache_heads(checkpoint.config)
    return 2 * heads.head_dim * heads.num_kv_heads * dtype.itemsize


def fit_blocks(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    cache_tokens: int,
    quant_type: QuantType = "none",
    free_bytes: int | None = None,
) -> MemoryFit:
    """Return how many blocks fit into free memory, each with a KV cache of `cache_tokens`.

    Sized by the largest block. Raises `InsufficientMemoryError` if not even one fits, and what
    `compute_block_bytes` raises.
    """
    free = free_memory_bytes(device) if free_bytes is None else free_bytes
    largest = max(compute_block_bytes(checkpoint, dtype, quant_type))
    cache = cache_tokens * cache_bytes_per_token(checkpoint, dtype)
    usable = free - max(int(free * RESERVE_FRACTION), RESERVE_BYTES)
    count = min(max(usable, 0) // (largest + cache), checkpoint.num_blocks)
    if not count:
        raise InsufficientMemoryError(
            f"one block of {checkpoint.name} takes {_format_mib(largest)}, and "
            f"{_format_mib(cache)} for {cache_tokens} tokens of cache, but "
            f"{_format_mib(max(usable, 0))} of {_format_mib(free)} free can be used; free memory, "
            "ask for a smaller cache, a 16-bit dtype or --quant-type int8"
        )
    return MemoryFit(int(count), free, largest, cache)


def require_room_for_embedder_and_head(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int | None = None,
) -> None:
    """Check, before downloading, that an untrusted model's embedding and head fit.

    They may take at most half of the usable free memory: requests and other models need the rest.
    Raises `InsufficientMemoryError`, `CorruptCheckpointError` for missing tensors, and
    `UnsupportedModelError` for weights stored as integers, which would take up to four times their
    file size.
    """
    skeleton = Skeleton(checkpoint)
    # Tied weights count once.
    stored = [
        checkpoint.tensors[n] for n in set(skeleton.source_names(embedder_and_head_names(skeleton)))
    ]
    if not all(info.dtype.is_floating_point for info in stored):
        raise UnsupportedModelError(
            f"{checkpoint.name} has its embedding or head as integers, which cannot be served; "
            "use a checkpoint in float32, float16 or bfloat16"
        )
    # The largest tensor is also held as stored while it is converted.
    needed = sum(info.numel * dtype.itemsize for info in stored)
    needed += max(info.nbytes for info in stored)
    # Weights for a GPU pass through CPU memory.
    free = min(map(free_memory_bytes, {"cpu", str(device)})) if free_bytes is None else free_bytes
    usable = max(free - RESERVE_BYTES, 0) // 2
    if needed > usable:
        raise InsufficientMemoryError(
            f"embedding and head of {checkpoint.name} take {_format_mib(needed)}, and "
            f"{_format_mib(usable)} of {_format_mib(free)} free are for a model that the swarm "
            "announces; where you want to serve it, name it with --model"
        )


def release_memory() -> None:
    """Collect garbage and return free memory to the system. Blocks the thread briefly.

    Modules refer to each other in cycles, and allocators keep what is freed.
    """
    gc.collect()
    trim_malloc_heap()
    torch.cuda.empty_cache()  # no-op before CUDA is used


def _cgroup_free_bytes(cgroup: Path) -> int:
    """Bytes below a container's memory limit; inactive file-cache pages count as free."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return 1 << 62  # no limit ("max"), or no cgroup v2
    stat = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return max(limit - used + int(stat.get("inactive_file", 0)), 0)


def _format_mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
