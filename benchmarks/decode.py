"""One session through 1, 2, 3 ... daemons of this machine against transformers alone.

One thread per process, and again as users run it (no `--threads`, all threads for transformers);
greedy, whole `generate` calls. The swarm and the local model take turns
within a run, so that a noisy machine disturbs both; the ratio is the median of the runs' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.figures import median_ratio
from benchmarks.footprint import Usage, memory_of
from benchmarks.generation import generate
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.others import measure_others
from benchmarks.results import print_table
from benchmarks.swarms import (
    Swarm,
    name_of_threads,
    open_swarm,
    share_of_model,
    torch_threads,
)

DEFAULTS = Options()
QUICK = Options(model="tiny", nodes=(2,), runs=1, new_tokens=8)
CACHE_TOKENS = 8192


def run(options: Options) -> list[dict[str, Any]]:
    """One row per number of daemons, and one per other program that is found here."""
    with model_folder(options) as folder:
        local = load_local(folder, options)
        rows = []
        for threads, nodes in product(options.threads, options.nodes):
            with open_swarm(folder, options, nodes, CACHE_TOKENS, threads) as swarm:
                rows.append(measure(folder, swarm, local, options) | {"threads": threads})
        show(rows, options)
        with torch_threads(1):
            return rows + measure_others(local, options)


def measure(folder: Path, swarm: Swarm, local: Any, options: Options) -> dict[str, Any]:
    prompt = random_prompt(local, options.prompt_tokens, options.seed)
    for model in (local, swarm.model):
        generate(model, prompt, 2)  # joins the swarm, touches all memory once
    runs = [measure_once(swarm, local, prompt, options.new_tokens) for _ in range(options.runs)]
    swarm_s = [one["swarm"]["seconds"] for one in runs]
    local_s = [one["local"]["seconds"] for one in runs]
    return {
        "nodes": len(swarm.nodes),
        "spans": swarm.spans,
        "swarm_tokens_per_s": options.new_tokens / median(swarm_s),
        "local_tokens_per_s": options.new_tokens / median(local_s),
        "ratio": median_ratio(local_s, swarm_s),
        "tokens_equal": all(one["tokens_equal"] for one in runs),
        "agreement": min(one["tokens_agreed"] for one in runs) / options.new_tokens,
        "ready_s": [node.startup_s for node in swarm.nodes],
        "memory": [
            memory_of(node) | share_of_model(folder, options, node.span, swarm.cache_tokens)
            for node in swarm.nodes
        ],
        "runs": runs,
    }


def measure_once(swarm: Swarm, local: Any, prompt: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    start = Usage.now(swarm.nodes)
    alone = generate(local, prompt, new_tokens)
    before = Usage.now(swarm.nodes)
    ours = generate(swarm.model, prompt, new_tokens)
    used = Usage.now(swarm.nodes).since(before)
    return {
        "local": alone.as_json() | {"cpu_s": before.since(start)["client_cpu_s"]},
        "swarm": ours.as_json() | used,
        "tokens_equal": ours.tokens == alone.tokens,
        "tokens_agreed": agreed(ours.tokens, alone.tokens),
    }


def agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The tokens before the first that differs; those after it continue another text."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(ours))


def show(rows: list[dict[str, Any]], options: Options) -> None:
    def of(row: dict[str, Any], key: str, who: str = "swarm") -> float:
        middle: float = median(one[who][key] or 0 for one in row["runs"])
        return middle

    def cpu_ms(row: dict[str, Any]) -> float:
        parts = ("client_cpu_s", "daemons_cpu_s", "p2pd_cpu_s")
        return sum(of(row, part) for part in parts) / options.new_tokens * 1000

    headings = (
        "nodes|threads|tokens/s|local|ratio|equal|until they\ndiffer|first token\nms|local\nms|"
        "gap p50\nms|p99\nms|"
        "CPU\nms/token|local\nms/token|wire\nKiB/token|USS\nMiB|RSS\nMiB|span\nMiB"
    )
    memory = ("uss_bytes", "rss_bytes", "span_bytes")
    cells = [
        (
            str(row["nodes"]),
            name_of_threads(row["threads"]),
            f"{row['swarm_tokens_per_s']:.1f}",
            f"{row['local_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            "yes" if row["tokens_equal"] else "NO",
            f"{row['agreement']:.0%}",
            f"{of(row, 'first_token_s') * 1000:.0f}",
            f"{of(row, 'first_token_s', 'local') * 1000:.0f}",
            f"{of(row, 'gap_p50_s') * 1000:.1f}",
            f"{of(row, 'gap_p99_s') * 1000:.1f}",
            f"{cpu_ms(row):.1f}",
            f"{of(row, 'cpu_s', 'local') / options.new_tokens * 1000:.1f}",
            f"{of(row, 'wire_bytes') / options.new_tokens / 1024:.1f}",
            *(f"{max(one[key] for one in row['memory']) / 2**20:.0f}" for key in memory),
        )
        for row in rows
    ]
    kind = options.dtype if options.quant_type == "none" else options.quant_type
    print_table(f"decode: {options.model}, {kind}, one session", headings, cells)
