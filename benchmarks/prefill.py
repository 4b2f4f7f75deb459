"""A long prompt through 1, 2, 3 daemons against transformers alone, and the pipeline's bubbles.

The wall time is that of `generate` with one new token. A machine with fewer cores than nodes
cannot show what a chain of machines would do, so beside it each chunk is timed in this process, on
one thread, through blocks like those that each node holds, and the times are replayed on a schedule
of one core for each node (`schedule.py`). The chunks are those that the client cuts.

T tokens of a chunk, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.figures import median_ratio
from benchmarks.generation import generate
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.schedule import schedule
from benchmarks.swarms import Swarm, name_of_threads, open_local, open_swarm, torch_threads
from nesa_node.client.session.base import RowSlice
from nesa_node.client.session.step_pipeline import split_step
from nesa_node.engine.cache.pages import pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks

DEFAULTS = Options(prompt_tokens=4_000, new_tokens=1)
QUICK = Options(model="tiny", nodes=(2,), runs=1, prompt_tokens=600, new_tokens=1)


def run(options: Options) -> list[dict[str, Any]]:
    """One row per number of daemons."""
    rows = []
    with model_folder(options) as folder:
        local = load_local(folder, options)
        for threads, nodes in product(options.threads, options.nodes):
            cache_tokens = 2 * options.prompt_tokens + 1024
            with open_swarm(folder, options, nodes, cache_tokens, threads) as swarm:
                rows.append(measure(folder, swarm, local, options) | {"threads": threads})
    show(rows, options)
    return rows


def measure(folder: Path, swarm: Swarm, local: Any, options: Options) -> dict[str, Any]:
    prompt = random_prompt(local, options.prompt_tokens, options.seed)
    for model in (local, swarm.model):
        generate(model, prompt[:, :64], 1)  # joins the swarm, touches all weights once
    checkpoint = open_local(folder)
    parts = [
        load_blocks(checkpoint, node.span, dtype=options.torch_dtype, device=options.device)
        for node in swarm.nodes
    ]
    counts = chunk_sizes(options.prompt_tokens, len(parts))
    runs = []
    for _ in range(options.runs):
        alone, ours = generate(local, prompt, 1), generate(swarm.model, prompt, 1)
        with torch_threads(1):
            chunk_s = time_chunks(parts, counts)
        runs.append(
            {
                "local_s": alone.first_token_s,
                "swarm_s": ours.first_token_s,
                "token_equal": ours.tokens == alone.tokens,
                "chunk_s": chunk_s,
                **schedule(chunk_s).as_json(),
            }
        )
    swarm_s = [one["swarm_s"] for one in runs]
    local_s = [one["local_s"] for one in runs]
    return {
        "nodes": len(parts),
        "spans": swarm.spans,
        "prompt_tokens": options.prompt_tokens,
        "chunks": counts,
        "swarm_tokens_per_s": options.prompt_tokens / median(swarm_s),
        "local_tokens_per_s": options.prompt_tokens / median(local_s),
        "ratio": median_ratio(local_s, swarm_s),
        "bubble_share": median(one["bubble_share"] for one in runs),
        "idle_share": median(one["idle_share"] for one in runs),
        "replayed_tokens_per_s": options.prompt_tokens / median(one["makespan_s"] for one in runs),
        "replayed_speedup": median(one["speedup"] for one in runs),
        "runs": runs,
    }


def chunk_sizes(tokens: int, hops: int) -> list[int]:
    """What the client makes of a prompt."""
    return [chunk.end - chunk.start for chunk in split_step([RowSlice(0, 0, tokens)], "last", hops)]


def time_chunks(parts: Sequence[ModelBlocks], counts: Sequence[int]) -> list[list[float]]:
    """Seconds that each of the consecutive chunks takes on each part."""
    generator = torch.Generator().manual_seed(0)
    prompt = [torch.randn(count, parts[0].hidden_size, generator=generator) for count in counts]
    seconds: list[list[float]] = []
    inputs = prompt
    for blocks in parts:
        pages = pages_for(sum(counts))
        promise = blocks.new_pool(sum(counts)).reserve(pages)
        table = promise.new_table()
        outputs, of_part = [], []
        for hidden_TD in inputs:
            table.reserve(table.length + len(hidden_TD))
            started = time.perf_counter()
            outputs.append(blocks.forward(hidden_TD, [RowChunk(table, len(hidden_TD))]))
            of_part.append(time.perf_counter() - started)
        seconds.append(of_part)
        inputs = outputs
    return seconds


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    headings = (
        "nodes|threads|spans|chunks|tokens/s|local|ratio|equal|"
        "one core per node:\ntokens/s|faster than\none node|idle %:\nthe busiest node|\nall nodes"
    )
    cells = [
        (
            str(row["nodes"]),
            name_of_threads(row["threads"]),
            " ".join(row["spans"]),
            f"{len(row['chunks'])} x {max(row['chunks'])}",
            f"{row['swarm_tokens_per_s']:.0f}",
            f"{row['local_tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}",
            "yes" if all(one["token_equal"] for one in row["runs"]) else "NO",
            f"{row['replayed_tokens_per_s']:.0f}",
            f"{row['replayed_speedup']:.2f}",
            f"{row['bubble_share'] * 100:.1f}",
            f"{row['idle_share'] * 100:.1f}",
        )
        for row in rows
    ]
    title = f"prefill: {options.model}, {options.dtype}, {options.prompt_tokens} tokens"
    print_table(title, headings, cells)
