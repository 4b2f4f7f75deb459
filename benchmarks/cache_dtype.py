"""A KV cache in 8 bits beside one in the blocks' data type: bytes, perplexity, time of a step.

All blocks run in this process on `--threads`. Perplexity is that of the beginning of a book that is
installed (the Debian handbook), in one window, each token after all those before it. Steps follow a
context of `--prompts` random hidden states and are dropped again: of one token, whose attention is
machine code, and of five, as drafts are verified, whose attention is torch's. The two kinds take
turns of a few steps.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from statistics import median
from typing import Any, get_args

import torch

from benchmarks.figures import median_ratio
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import format_cell, print_table
from benchmarks.swarms import name_of_threads, open_local, torch_threads
from nesa_node.client.model.auto import build_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.layers import LocalConnection
from nesa_node.client.session.base import SwarmConnection
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.cache.pages import PageTable, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.tokenizer import load_tokenizer
from nesa_node.evaluation.scoring import (
    Perplexity,
    first_tokens,
    measure_perplexity,
    paired_t,
)
from nesa_node.evaluation.tasks import default_text, read_text
from nesa_node.verification.distributions import ComputeLogits

DEFAULTS = Options(
    model="demo", dtype="bfloat16", threads=(1,), prompts=(512, 2000, 4096), new_tokens=64
)
QUICK = Options(model="tiny", threads=(1,), prompts=(64,), runs=1, new_tokens=4)

TEXT_TOKENS = 4096
KINDS: tuple[CacheDtype, ...] = get_args(CacheDtype)
STEP_TOKENS = (1, 5)
TURN_STEPS = 8
PREFILL_TOKENS = 512


def run(options: Options) -> list[dict[str, Any]]:
    """A row for each kind of cache, then one for each context and number of tokens in a step."""
    with model_folder(options) as folder, torch_threads(options.threads[0]):
        checkpoint = open_local(folder)
        blocks = {kind: _load(checkpoint, options, kind) for kind in KINDS}
        rows = _measure_kinds(checkpoint, blocks, options)
        for context in options.prompts:
            tables = {kind: _fill(blocks[kind], context, options.seed) for kind in KINDS}
            for tokens in STEP_TOKENS:
                rows.append(_measure_steps(blocks, tables, context, tokens, options))
    show(rows, options)
    return rows


def _load(checkpoint: Checkpoint, options: Options, kind: CacheDtype) -> ModelBlocks:
    return load_blocks(
        checkpoint,
        Span(0, checkpoint.num_blocks),
        dtype=options.torch_dtype,
        device=options.device,
        quant_type=options.quant_type,
        cache_dtype=kind,
    )


def _measure_kinds(
    checkpoint: Checkpoint, blocks: Mapping[CacheDtype, ModelBlocks], options: Options
) -> list[dict[str, Any]]:
    """Bytes, and perplexity of a model that knows text, which a random one does not."""
    found: dict[CacheDtype, Perplexity] = {}
    rows: list[dict[str, Any]] = []
    for kind, part in blocks.items():
        bytes_per_token = part.cache_bytes_per_token
        row: dict[str, Any] = {
            "cache": kind,
            "bytes_per_token": bytes_per_token,
            "bytes_ratio": bytes_per_token / part.full_cache_bytes_per_token,
            "runs": [{"bytes_per_token": bytes_per_token}],
        }
        if options.model == "demo":
            with _opened(checkpoint, part, options) as model:
                tokenizer = load_tokenizer(checkpoint.fetch_side_files())
                ids = first_tokens(tokenizer, read_text(default_text()), TEXT_TOKENS + 1)
                found[kind] = measure_perplexity(model, ids, context=len(ids), stride=len(ids) - 1)
            change = paired_t(found[kind].block_nll, found["auto"].block_nll)
            row |= {
                "perplexity": found[kind].value,
                "perplexity_error": found[kind].standard_error,
                "text_tokens": found[kind].tokens,
                "mean_nll_change": change.mean,
                "mean_nll_change_error": change.standard_error,
                "p_value": change.p_value,
                "block_nll": [round(value, 6) for value in found[kind].block_nll],
            }
        rows.append(row)
    return rows


@contextmanager
def _opened(
    checkpoint: Checkpoint, part: ModelBlocks, options: Options
) -> Iterator[DistributedModelForCausalLM]:
    connection = LocalConnection([part])

    @asynccontextmanager
    async def connect(_: ComputeLogits) -> AsyncIterator[SwarmConnection]:
        yield connection

    try:
        with build_model(
            checkpoint, connect, dtype=options.torch_dtype, device=options.device
        ) as model:
            yield model
    finally:
        connection.close()


def _fill(blocks: ModelBlocks, context: int, seed: int) -> PageTable:
    """A row of `context` tokens, with room for a step."""
    room = context + max(STEP_TOKENS)
    table = blocks.new_pool(room).reserve(pages_for(room)).new_table()
    generator = torch.Generator().manual_seed(seed)
    hidden_LD = torch.randn(context, blocks.hidden_size, generator=generator)
    for chunk_LD in torch.split(hidden_LD, PREFILL_TOKENS):
        _run(blocks, table, chunk_LD)
    return table


def _run(blocks: ModelBlocks, table: PageTable, hidden_LD: torch.Tensor) -> None:
    table.reserve(table.length + len(hidden_LD))
    blocks.forward(hidden_LD, [RowChunk(table, len(hidden_LD))])


def _measure_steps(
    blocks: Mapping[CacheDtype, ModelBlocks],
    tables: Mapping[CacheDtype, PageTable],
    context: int,
    tokens: int,
    options: Options,
) -> dict[str, Any]:
    hidden_LD = torch.randn(tokens, blocks["auto"].hidden_size)
    steps = {kind: partial(_run, blocks[kind], tables[kind], hidden_LD) for kind in KINDS}
    runs = [
        _time_steps(steps, tables, context, options.new_tokens) for _ in range(options.runs + 1)
    ][1:]  # the first one compiles
    row: dict[str, Any] = {"context": context, "step_tokens": tokens, "runs": runs}
    row |= {f"{kind}_s": median(each[kind] for each in runs) for kind in KINDS}
    row["ratio"] = median_ratio([each["int8"] for each in runs], [each["auto"] for each in runs])
    return row


def _time_steps(
    steps: Mapping[CacheDtype, partial[None]],
    tables: Mapping[CacheDtype, PageTable],
    context: int,
    count: int,
) -> dict[str, float]:
    """The median seconds of a step by kind; each step is dropped again."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    while len(times["auto"]) < count:
        for kind, step in steps.items():
            for _ in range(TURN_STEPS):
                started = time.perf_counter()
                step()
                times[kind].append(time.perf_counter() - started)
                tables[kind].truncate(context)
    return {kind: median(each) for kind, each in times.items()}


def show(rows: list[dict[str, Any]], options: Options) -> None:
    threads = name_of_threads(options.threads[0])
    print_table(
        f"KV cache of {options.model} in {options.dtype} and in int8, {threads} thread(s)",
        "cache|bytes per\ntoken|of auto|perplexity|change|p|context|tokens\nof a step|auto, ms|"
        "int8, ms|int8 / auto",
        [
            [
                str(row.get("cache", "")),
                format_cell(row, "bytes_per_token", "{:.0f}"),
                format_cell(row, "bytes_ratio", "{:.3f}"),
                format_cell(row, "perplexity", "{:.4f}"),
                format_cell(row, "mean_nll_change", "{:+.3f} %", 100.0),
                format_cell(row, "p_value", "{:.2f}"),
                format_cell(row, "context", "{:.0f}"),
                format_cell(row, "step_tokens", "{:.0f}"),
                format_cell(row, "auto_s", "{:.2f}", 1e3),
                format_cell(row, "int8_s", "{:.2f}", 1e3),
                format_cell(row, "ratio", "{:.2f}"),
            ]
            for row in rows
        ],
    )
