"""Devices: their choice by name, their free memory, and a span's throughput on them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import psutil
import torch
from torch import Tensor

from nesa_node.core.errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype, QuantType
from nesa_node.engine.cache.pages import PageTable, pages_for
from nesa_node.engine.kernels.linear import trim_malloc_heap
from nesa_node.engine.kernels.threads import clipped_mean
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.embedder_and_head import embedder_and_head_names
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.topology.roofline import BlockWork

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


def check_quant_type(
    setting: str, quant_type: str, device: torch.device, known: Sequence[str]
) -> None:
    """Raise `ConfigError` for a quantization that is not `known`, or that `device` has not."""
    if quant_type not in known:
        raise ConfigError(f"{setting} {quant_type}: give {', '.join(known)}")
    if device.type == "mps" and quant_type != "none":
        raise ConfigError(f"{setting} {quant_type} needs --device cpu or cuda")


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


def usable_bytes(free_bytes: int) -> int:
    """What blocks may take of free memory."""
    return max(free_bytes - max(int(free_bytes * RESERVE_FRACTION), RESERVE_BYTES), 0)


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


def _active_fraction(checkpoint: Checkpoint) -> float:
    """Return the share of a block's weights that one token uses, of a mixture of experts."""
    config = checkpoint.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / experts if experts and used else 1.0


def compute_block_work(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    block_bytes: Sequence[int],
    plain_bytes: Sequence[int],
) -> tuple[BlockWork, ...]:
    """What one token asks of each block. `block_bytes` and `plain_bytes` are of
    `compute_block_bytes`, as held and without quantization.
    """
    active = _active_fraction(checkpoint)
    return tuple(
        BlockWork(active * size, active * 2 * plain / dtype.itemsize)
        for size, plain in zip(block_bytes, plain_bytes, strict=True)
    )


def cache_bytes_per_token(
    checkpoint: Checkpoint, dtype: torch.dtype, cache_dtype: CacheDtype = "auto"
) -> int:
    """Return the KV cache bytes of one token in one block, the largest if they differ."""
    shapes = set(checkpoint.family.list_cache_heads(checkpoint.config))
    return max(heads.bytes_per_token(dtype, cache_dtype) for heads in shapes)


def fit_blocks(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    cache_tokens: int,
    quant_type: QuantType = "none",
    cache_dtype: CacheDtype = "auto",
    free_bytes: int | None = None,
) -> MemoryFit:
    """Return how many blocks fit into free memory, each with a KV cache of `cache_tokens`.

    Sized by the largest block. Raises `InsufficientMemoryError` if not even one fits, and what
    `compute_block_bytes` raises.
    """
    free = free_memory_bytes(device) if free_bytes is None else free_bytes
    largest = max(compute_block_bytes(checkpoint, dtype, quant_type))
    cache = cache_tokens * cache_bytes_per_token(checkpoint, dtype, cache_dtype)
    usable = usable_bytes(free)
    count = min(usable // (largest + cache), checkpoint.num_blocks)
    if not count:
        raise InsufficientMemoryError(
            f"one block of {checkpoint.name} takes {_format_mib(largest)}, and "
            f"{_format_mib(cache)} for {cache_tokens} tokens of cache, but "
            f"{_format_mib(usable)} of {_format_mib(free)} free can be used; free memory, "
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


MAX_PREFILL_TOKENS = 128
WARMUP_TOKENS = 16
MAX_DECODE_STEPS = 16
MIN_DECODE_STEPS = 3
MAX_PREFILL_REPEATS = 3
COLD_STEPS = 24
PAUSE_S = 0.02
"""Pause before a step on a GPU."""
FLUSH_BYTES = 256 << 20
"""Bytes that are read before a step on a CPU: more than its caches hold, and long enough for its
threads to sleep."""
UNDISTURBED_STEPS = 100
UNDISTURBED_SHARE = 0.2
"""Share of the steps, the fastest, that tell what a device does when nothing else runs."""
MAX_TUNING_STEPS = 128
TUNING_DEADLINE_S, DECODE_DEADLINE_S, PREFILL_DEADLINE_S = 0.6, 0.9, 1.2
"""Deadlines in seconds since the start: no further steps are run to tune the number of threads, to
time decoding, to time prefill. The minimum of each runs in any case."""


@dataclass(frozen=True, slots=True)
class SpanThroughput:
    """Tokens per second of one sequence through the whole measured span, without network.

    It is proportional to 1 / blocks: a part runs at `tokens_per_s * len(span) / len(part)`.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_throughput(
    blocks: ModelBlocks,
    *,
    stop: Callable[[], bool] = bool,
    clock: Callable[[], float] = time.perf_counter,
    time_fraction: float = 1.0,
    undisturbed: bool = False,
) -> SpanThroughput:
    """Time single-token steps and prefills of `MAX_PREFILL_TOKENS`, to `PREFILL_DEADLINE_S`.

    Tunes the number of threads first. Blocks the thread; `time_fraction` scales the deadlines.
    `undisturbed`: by the fastest steps, as if other programs that run now did not. Raises
    `MeasurementCancelled` before the next step once `stop` returns true.
    """
    return _ThroughputMeasurement(blocks, stop, clock, time_fraction, undisturbed).throughput()


def measure_cold_step_s(blocks: ModelBlocks) -> float:
    """Seconds of a decode step whose weights have left the caches, and whose threads sleep, as in a
    chain, where a node waits for its turn. In the mean of the faster half of `COLD_STEPS`.

    Blocks the thread for a second.
    """
    return _ThroughputMeasurement(blocks, bool, time.perf_counter, 1.0, True).cold_step_s()


class MeasurementCancelled(Exception):
    """The measurement was stopped, since other work needs the device."""


class _ThroughputMeasurement:
    def __init__(
        self,
        blocks: ModelBlocks,
        stop: Callable[[], bool],
        clock: Callable[[], float],
        time_fraction: float,
        undisturbed: bool,
    ) -> None:
        self._blocks, self._stop, self._clock = blocks, stop, clock
        self._time_fraction, self._undisturbed = time_fraction, undisturbed
        self._began = clock()
        generator = torch.Generator().manual_seed(0)
        shape = (min(MAX_PREFILL_TOKENS, blocks.context_length // 2), blocks.hidden_size)
        self._hidden_LD = torch.randn(shape, generator=generator)
        self._warmup_LD = self._hidden_LD[:WARMUP_TOKENS]

    def throughput(self) -> SpanThroughput:
        # The first prefill of a size is slow: it counts only if there is no time for another.
        decode_s = self._measure_decode_s()
        prefills_s = [self._time_prefill()]
        while len(prefills_s) <= MAX_PREFILL_REPEATS and not self._is_past(PREFILL_DEADLINE_S):
            prefills_s.append(self._time_prefill())
        summarize = min if self._undisturbed else median
        return SpanThroughput(
            prefill_tokens_per_s=len(self._hidden_LD) / summarize(prefills_s[1:] or prefills_s),
            decode_tokens_per_s=1 / decode_s,
        )

    def _measure_decode_s(self) -> float:
        """Seconds of a decode step after a short prefill, which also warms up all weights."""
        with self._warm_table() as table:
            for _ in range(MAX_TUNING_STEPS):
                self._time_decode_step(table)
                settled = self._blocks.threads.is_settled(1, len(self._blocks.span))
                if settled or self._is_past(TUNING_DEADLINE_S):
                    break
            steps_s = [self._time_decode_step(table) for _ in range(MIN_DECODE_STEPS)]
            most = UNDISTURBED_STEPS if self._undisturbed else MAX_DECODE_STEPS
            while len(steps_s) < most and not self._is_past(DECODE_DEADLINE_S):
                steps_s.append(self._time_decode_step(table))
        if self._undisturbed:
            return fmean(sorted(steps_s)[: math.ceil(UNDISTURBED_SHARE * len(steps_s))])
        return clipped_mean(steps_s)

    def cold_step_s(self) -> float:
        pause: Callable[[], object] = partial(time.sleep, PAUSE_S)
        if self._blocks.device.type != "cuda":
            # NumPy reads in this thread alone.
            pause = np.ones(FLUSH_BYTES // 8, dtype=np.uint64).max
        steps_s = []
        with self._warm_table() as table:
            for _ in range(COLD_STEPS):
                pause()
                steps_s.append(self._time_decode_step(table))
        return fmean(sorted(steps_s)[: COLD_STEPS // 2])

    def _time_prefill(self) -> float:
        with self._new_table(len(self._hidden_LD)) as table:
            return self._time_step(table, self._hidden_LD)

    def _time_decode_step(self, table: PageTable) -> float:
        """Seconds of one decode step, always at the same position."""
        seconds = self._time_step(table, self._hidden_LD[:1])
        table.truncate(table.length - 1)
        return seconds

    @contextmanager
    def _warm_table(self) -> Iterator[PageTable]:
        """A row that holds a short prompt and has space for one more token."""
        with self._new_table(len(self._warmup_LD) + 1) as table:
            self._time_step(table, self._warmup_LD)
            yield table

    @contextmanager
    def _new_table(self, tokens: int) -> Iterator[PageTable]:
        # Closed, so that the cache is freed at once and not when cycles of objects are collected.
        with closing(self._blocks.new_pool(tokens).reserve(pages_for(tokens))) as reservation:
            table = reservation.new_table()
            table.reserve(tokens)
            yield table

    def _time_step(self, table: PageTable, hidden_LD: Tensor) -> float:
        if self._stop():
            raise MeasurementCancelled
        start = self._clock()
        table.reserve(table.length + len(hidden_LD))
        self._blocks.forward(hidden_LD, [RowChunk(table, len(hidden_LD))])
        if self._blocks.device.type == "cuda":
            torch.cuda.synchronize(self._blocks.device)
        return self._clock() - start

    def _is_past(self, deadline_s: float) -> bool:
        return self._clock() - self._began >= deadline_s * self._time_fraction
