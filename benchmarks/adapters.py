"""What LoRA adapters cost a decode step: one session, and eight over four adapters and the base.

A span of all blocks in this process, on `--threads`: no hops. Steps with and without adapters take
turns, and begin after the same prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import Span
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from nesa_node.engine.adapters.served_adapter import ServedAdapter, SpanLayout
from nesa_node.engine.cache.pages import PAGE_TOKENS, PageTable, pages_for
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, StepBuffers
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.hub import open_checkpoint

DEFAULTS = Options(threads=(1,), runs=15, sessions=(1, 8), prompt_tokens=64)
QUICK = Options(model="tiny", threads=(1,), runs=2, sessions=(1, 8), prompt_tokens=8)
RANKS = (8, 16, 64)
"""On all linear layers."""
ADAPTERS = 4
STEPS = 4
"""Of each kind, one after the other."""


@dataclass
class TokenBuffers:
    """One row's token of a step."""

    buffers: StepBuffers
    start: int = 0
    end: int = 1


def run(options: Options) -> list[dict[str, Any]]:
    rows = []
    with model_folder(options) as folder, TemporaryDirectory(prefix="nesa-bench-lora-") as adapters:
        checkpoint = open_checkpoint(str(folder), cache_dir=default_cache_dir())
        blocks = load_blocks(
            checkpoint,
            Span(0, checkpoint.num_blocks),
            dtype=options.torch_dtype,
            device=options.device,
            quant_type=options.quant_type,
        )
        for rank in RANKS:
            loaded, load_s = load_adapters(blocks, Path(adapters), rank, options.seed)
            for threads in options.threads:
                fix_threads(threads or torch.get_num_threads())
                for sessions in options.sessions:
                    measured = measure(blocks, loaded, sessions, options)
                    rows.append(
                        {
                            "rank": rank,
                            "threads": threads,
                            "sessions": sessions,
                            "adapter_mib": loaded[0].nbytes / 2**20,
                            "adapter_share": loaded[0].nbytes / blocks.weight_bytes,
                            "load_s": load_s,
                            **measured,
                        }
                    )
    show(rows)
    return rows


def load_adapters(
    blocks: ModelBlocks, folder: Path, rank: int, seed: int
) -> tuple[list[ServedAdapter], float]:
    """Adapters of random weights, and the median seconds that one takes to load."""
    loaded, seconds = [], []
    for number in range(ADAPTERS):
        target = folder / f"{rank}-{number}"
        save_random_adapter(target, blocks.adapter_layout, rank, seed + number)
        started = time.perf_counter()
        loaded.append(blocks.load_adapter(target))
        seconds.append(time.perf_counter() - started)
    return loaded, median(seconds)


def save_random_adapter(folder: Path, layout: SpanLayout, rank: int, seed: int) -> None:
    """Save an adapter of all linear layers of the span, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for block in range(layout.span.start, layout.span.end):
        for linear in layout.linears:
            for layer in linear.layers:
                path = f"base_model.model.{layout.layers_path}.{block}.{layer.name}"
                for side, shape in (
                    ("A", (rank, linear.in_features)),
                    ("B", (layer.count, rank)),
                ):
                    values = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{path}.lora_{side}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def measure(
    blocks: ModelBlocks, adapters: Sequence[ServedAdapter], sessions: int, options: Options
) -> dict[str, Any]:
    """Milliseconds of a step of so many sessions with and without adapters."""
    pages = pages_for(options.prompt_tokens + 1)
    # With room to spare, each row's pages lie one behind the other, as recorded steps need.
    pool = blocks.new_pool(8 * sessions * pages * PAGE_TOKENS)
    kinds: list[ServedAdapter | None] = [*adapters, None]
    chosen = [kinds[number % len(kinds)] for number in range(sessions)]
    rows: dict[str, list[RowChunk]] = {}
    for name, of_rows in (("base", [None] * sessions), ("adapters", chosen)):
        tables = [pool.reserve(pages).new_table() for _ in of_rows]
        rows[name] = [
            RowChunk(table, 1, adapter) for table, adapter in zip(tables, of_rows, strict=True)
        ]
        for row in rows[name]:
            fill(blocks, row.table, row.adapter, options)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(options.runs + 1):
        for name, runs in rows.items():
            for _ in range(STEPS):
                elapsed, cpu = time_step(blocks, runs)
                if turn:  # the first one allocates and records
                    seconds[name].append(elapsed)
                    cpu_seconds[name].append(cpu)
    step_ms = {name: median(each) * 1e3 for name, each in seconds.items()}
    cpu_ms = {name: median(each) * 1e3 for name, each in cpu_seconds.items()}
    return {
        "step_ms": step_ms,
        "ratio": step_ms["base"] / step_ms["adapters"],
        "cpu_ms": cpu_ms,
        "cpu_ratio": cpu_ms["base"] / cpu_ms["adapters"],
        "runs": [seconds],
    }


def fill(
    blocks: ModelBlocks, table: PageTable, adapter: ServedAdapter | None, options: Options
) -> None:
    table.reserve(options.prompt_tokens + 1)
    generator = torch.Generator().manual_seed(options.seed)
    hidden_LD = torch.randn(options.prompt_tokens, blocks.hidden_size, generator=generator)
    blocks.forward(hidden_LD, [RowChunk(table, options.prompt_tokens, adapter)])


def time_step(blocks: ModelBlocks, runs: Sequence[RowChunk]) -> tuple[float, float]:
    """Seconds, and those of the processor, of a step of one token for each row.

    The step is taken back.
    """
    pieces = []
    for run in runs:
        run.table.reserve(run.table.length + 1)
        hidden_1D = torch.ones(1, blocks.hidden_size, dtype=blocks.dtype)
        pieces.append(TokenBuffers(StepBuffers(HiddenStates.from_tensor(hidden_1D), blocks.dtype)))
    started, cpu_started = time.perf_counter(), time.process_time()
    blocks.forward_buffers(pieces, runs)
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    for run in runs:
        run.table.truncate(run.table.length - 1)
    return elapsed, cpu


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        "Decode steps with LoRA adapters on all linear layers: eight sessions use four adapters "
        "and the base",
        "rank|MiB|% of weights|load s|threads|sessions|base ms|with adapters|speed|by CPU time",
        [
            [
                str(row["rank"]),
                f"{row['adapter_mib']:.1f}",
                f"{row['adapter_share'] * 100:.1f}",
                f"{row['load_s']:.2f}",
                str(row["threads"]),
                str(row["sessions"]),
                f"{row['step_ms']['base']:.2f}",
                f"{row['step_ms']['adapters']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['cpu_ratio']:.2f}",
            ]
            for row in rows
        ],
    )
