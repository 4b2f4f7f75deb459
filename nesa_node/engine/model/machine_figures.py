"""What this machine's device does: memory bandwidth, arithmetic and overhead by kind of weights.

`python -m nesa_node.engine.model.machine_figures DEVICE THREADS|auto FOLDER` prints them as one
line of JSON, in a process of its own, whose memory is freed. FOLDER keeps them for a day.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock
from safetensors.torch import save_file
from transformers import LlamaConfig

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.linear import FastLinear
from nesa_node.engine.kernels.quantized_linear import QuantizedLinear
from nesa_node.engine.kernels.threads import QUIET_SHARE, IdleCores, fix_threads
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import (
    MAX_PREFILL_TOKENS,
    choose_device,
    compute_block_bytes,
    compute_block_work,
    measure_cold_step_s,
    measure_throughput,
    release_memory,
)
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint, open_folder
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures

WEIGHT_KINDS: tuple[tuple[str, torch.dtype, QuantType], ...] = (
    ("bfloat16", torch.bfloat16, "none"),
    ("float32", torch.float32, "none"),
    ("int8", torch.bfloat16, "int8"),
    ("nf4", torch.bfloat16, "nf4"),
)
"""Name, data type of activations, and quantization."""
_HIDDEN_SIZES = {"cpu": (128, 1024), "cuda": (512, 4096)}
"""A block so small that its overhead is what takes time, and a large one."""
_NUM_BLOCKS = 2
_TIME_FRACTION = 0.4
"""Of the time that a node takes to measure its span."""
_PRODUCTS = 50
MAX_FIGURES_AGE_S = 86_400.0
QUIET_RUNS = 3
"""Measurements of a quiet machine, of which the slowest figures count."""
MEASUREMENT_LOCK = "figures.lock"
"""File in the cache folder, locked by a process while it measures: several would share cores."""
_FIGURES_VERSION = 6
"""Changes with what is measured, so that older files are not read."""


def measure_figures(device: torch.device) -> dict[str, WeightFigures]:
    """Measure each kind of weights that the device can hold, about a second each.

    Blocks the thread. Kinds that fail (nf4 without its library) are left out.
    """
    small, large = _HIDDEN_SIZES["cuda" if device.type == "cuda" else "cpu"]
    figures = {}
    with TemporaryDirectory(prefix="nesa-figures-") as folder:
        models = [_write_model(Path(folder) / str(size), size) for size in (small, large)]
        for kind, dtype, quant_type in WEIGHT_KINDS:
            with suppress(ImportError, RuntimeError, ValueError, MemoryError):
                figures[kind] = _measure_kind(models, dtype, quant_type, device)
    # That of the device: the kinds differ by noise.
    wakeup_s = median([each.wakeup_s for each in figures.values()] or [0.0])
    return {kind: replace(each, wakeup_s=wakeup_s) for kind, each in figures.items()}


def _measure_kind(
    models: Sequence[Checkpoint], dtype: torch.dtype, quant_type: QuantType, device: torch.device
) -> WeightFigures:
    small, large = (_measure_model(model, dtype, quant_type, device) for model in models)
    overlaps = device.type == "cuda"
    if overlaps:
        read_bytes_per_s, overhead_s = large.read_bytes_per_s, small.decode_s
        wakeup_s = large.cold_step_s - _NUM_BLOCKS * large.decode_s
    else:
        read_s = large.cold_step_s - small.cold_step_s
        read_s = max(read_s, 0.1 * large.cold_step_s) / _NUM_BLOCKS
        read_bytes_per_s = (large.weight_bytes - small.weight_bytes) / read_s
        overhead_s = small.decode_s
        read_s = small.weight_bytes / read_bytes_per_s
        wakeup_s = small.cold_step_s - _NUM_BLOCKS * (overhead_s + read_s)
    prefill_s = large.prefill_s if overlaps else large.prefill_s - overhead_s
    flop = MAX_PREFILL_TOKENS * 2 * _count_parameters(models[1]) / _NUM_BLOCKS
    return WeightFigures(
        overhead_s,
        read_bytes_per_s,
        flop / max(prefill_s, 0.1 * large.prefill_s),
        overlaps,
        max(wakeup_s, 0.0),
    )


@dataclass(frozen=True, slots=True)
class _BlockTimes:
    """Bytes and seconds of one block, in steps one after the other; seconds of a whole step with
    cold caches; the rate of the largest product alone, on a GPU."""

    weight_bytes: float
    decode_s: float
    prefill_s: float
    cold_step_s: float
    read_bytes_per_s: float


def _measure_model(
    model: Checkpoint, dtype: torch.dtype, quant_type: QuantType, device: torch.device
) -> _BlockTimes:
    span = Span(0, model.num_blocks)
    blocks = load_blocks(model, span, dtype=dtype, device=device, quant_type=quant_type)
    throughput = measure_throughput(blocks, time_fraction=_TIME_FRACTION, undisturbed=True)
    times = _BlockTimes(
        blocks.weight_bytes / _NUM_BLOCKS,
        1 / throughput.decode_tokens_per_s / _NUM_BLOCKS,
        MAX_PREFILL_TOKENS / throughput.prefill_tokens_per_s / _NUM_BLOCKS,
        measure_cold_step_s(blocks),
        _measure_product(blocks, device) if device.type == "cuda" else math.nan,
    )
    del blocks
    release_memory()
    return times


@torch.inference_mode()
def _measure_product(blocks: ModelBlocks, device: torch.device) -> float:
    """Bytes/s of weights that one token's product reads: a step waits for the launches instead."""
    linear = [m for m in blocks.modules() if isinstance(m, FastLinear | QuantizedLinear)]
    layer = max(linear, key=lambda each: each.in_features * each.out_features)
    row_1C = torch.ones(1, layer.in_features, dtype=blocks.dtype, device=device)
    layer(row_1C)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_PRODUCTS):
        layer(row_1C)
    torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - started) / _PRODUCTS
    return sum(weight.nbytes for weight in layer.parameters()) / seconds


def _write_model(folder: Path, hidden_size: int) -> Checkpoint:
    """A Llama of `_NUM_BLOCKS` blocks with random weights, without its ends."""
    folder.mkdir()
    config = LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=_NUM_BLOCKS,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 256),
        intermediate_size=hidden_size * 11 // 4,
        vocab_size=8,
        max_position_embeddings=1024,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    heads = max(1, hidden_size // 256) * 64
    shapes = {
        "self_attn.q_proj": (hidden_size, hidden_size),
        "self_attn.k_proj": (heads, hidden_size),
        "self_attn.v_proj": (heads, hidden_size),
        "self_attn.o_proj": (hidden_size, hidden_size),
        "mlp.gate_proj": (config.intermediate_size, hidden_size),
        "mlp.up_proj": (config.intermediate_size, hidden_size),
        "mlp.down_proj": (hidden_size, config.intermediate_size),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{index}.{name}.weight": torch.empty(shape, dtype=torch.bfloat16).uniform_(
            -0.05, 0.05, generator=generator
        )
        for index in range(_NUM_BLOCKS)
        for name, shape in shapes.items()
    }
    ones = torch.ones(hidden_size, dtype=torch.bfloat16)
    for index in range(_NUM_BLOCKS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{index}.{name}.weight"] = ones.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_folder(folder)


def _count_parameters(model: Checkpoint) -> int:
    return sum(info.numel for info in model.tensors.values())


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """Figures by kind of weights; share of the cores that other processes used meanwhile.

    They are the slowest of `runs` measurements: a computer whose memory or cores are shared with
    other virtual machines changes its speed within minutes, by half.
    """

    kinds: dict[str, WeightFigures]
    others_share: float
    runs: int = 1

    @property
    def are_quiet(self) -> bool:
        """Whether the machine did little else meanwhile."""
        return self.others_share <= QUIET_SHARE

    @property
    def are_complete(self) -> bool:
        """Whether they need no further measurement."""
        return self.are_quiet and self.runs >= QUIET_RUNS

    def combine(self, later: MachineFigures) -> MachineFigures:
        """The slower figures of two quiet measurements, else the quieter measurement."""
        if not (self.are_quiet and later.are_quiet):
            return self if self.others_share < later.others_share else later
        kinds = {
            kind: each.slower(later.kinds[kind])
            for kind, each in self.kinds.items()
            if kind in later.kinds
        }
        share = max(self.others_share, later.others_share)
        return MachineFigures(kinds, share, self.runs + 1)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MachineFigures:
        """Raises `ValueError` and `TypeError` for anything but the result of `as_json`."""
        stored = json.loads(text)
        kinds = {kind: WeightFigures(**each) for kind, each in stored.pop("kinds").items()}
        return cls(kinds, **stored)


def measure_once(device: torch.device, threads: int, folder: Path) -> MachineFigures:
    """Measure, unless this device's figures of the last `MAX_FIGURES_AGE_S` are complete, or
    another process measures it meanwhile: only one does at a time.

    Returns what is known then (`MachineFigures.combine`). The files lie in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, asked_at = _figures_path(device, threads, folder), time.time()
    with FileLock(folder / MEASUREMENT_LOCK):
        stored = read_fresh_figures(device, threads, folder)
        if stored is not None and (stored.are_complete or path.stat().st_mtime > asked_at):
            return stored
        figures = _measure_with_load(device)
        if stored is not None:
            figures = stored.combine(figures)
        if figures is not stored:
            draft = path.with_suffix(".draft")
            draft.write_text(figures.as_json())
            draft.replace(path)
        return figures


def read_fresh_figures(device: torch.device, threads: int, folder: Path) -> MachineFigures | None:
    """Read what was measured on this device within `MAX_FIGURES_AGE_S`; None if nothing was."""
    with suppress(OSError):
        measured_at = _figures_path(device, threads, folder).stat().st_mtime
        if time.time() - measured_at < MAX_FIGURES_AGE_S:
            return read_figures(device, threads, folder)
    return None


def read_figures(device: torch.device, threads: int, folder: Path) -> MachineFigures | None:
    """Read what was measured on this device, at any time; None if nothing was."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        text = _figures_path(device, threads, folder).read_text("utf-8")
        return MachineFigures.from_json(text)
    return None


def _measure_with_load(device: torch.device) -> MachineFigures:
    idle_cores, started, own_s = IdleCores(), time.monotonic(), _cpu_s()
    kinds = measure_figures(device)
    own_cores = (_cpu_s() - own_s) / (time.monotonic() - started)
    others_share = idle_cores.busy_share() - own_cores / idle_cores.num_cores
    return MachineFigures(kinds, max(others_share, 0.0))


def _cpu_s() -> float:
    """Processor time of this process and of those that it started, which compile kernels."""
    return sum(os.times()[:4])


def find_roofline(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    quant_type: QuantType,
    device: torch.device,
    folder: Path,
) -> Roofline | None:
    """The roofline of a model's blocks here, by figures of an earlier measurement in `folder`.

    None without one: measuring takes seconds, which a node's start has not. Raises as
    `compute_block_bytes`.
    """
    kind = str(dtype).removeprefix("torch.") if quant_type == "none" else quant_type
    measured = read_figures(device, torch.get_num_threads(), folder)
    figures = None if measured is None else measured.kinds.get(kind)
    if figures is None:
        return None
    block_bytes = compute_block_bytes(checkpoint, dtype, quant_type)
    plain_bytes = compute_block_bytes(checkpoint, dtype)
    works = compute_block_work(checkpoint, dtype, block_bytes, plain_bytes)
    read_bytes = sum(work.read_bytes for work in works) / len(works)
    return Roofline(figures, BlockWork(read_bytes, sum(work.flop for work in works) / len(works)))


def _figures_path(device: torch.device, threads: int, folder: Path) -> Path:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    words = f"{name} {threads} {torch.__version__} {_FIGURES_VERSION}"
    return folder / f"figures-{re.sub(r'[^A-Za-z0-9]+', '-', words)}.json"


def main() -> None:
    # The models that it writes are deleted, too, if it is to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    device, threads, folder = sys.argv[1:]
    if threads != "auto":
        fix_threads(int(threads))
    figures = measure_once(choose_device(device), torch.get_num_threads(), Path(folder))
    print(json.dumps(asdict(figures) | {"are_complete": figures.are_complete}))


if __name__ == "__main__":
    main()
