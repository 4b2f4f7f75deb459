"""Many sessions at once through the same daemons, and what a long prefill does to one of them.

The sessions are threads of one client process, each with a `generate` call of its own, as a server
in front of the swarm would have them: one process computes embedding and head for all of them. Its
processor time is in every run, so that it shows where the client is what is measured. All of it is
measured with one thread for each process, and again as users run it (no `--threads`). Within a run
the local model (one stream) and every number of sessions take turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import median
from threading import Barrier
from typing import Any

import torch

from benchmarks.disturbance import disturb, show_disturbance, summarize_disturbance
from benchmarks.figures import median_ratio, percentile
from benchmarks.footprint import Usage
from benchmarks.generation import Generation, generate
from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import Swarm, name_of_threads, open_swarm

DEFAULTS = Options(nodes=(3,), sessions=(1, 4, 16, 64), long_prompt=2_000)
QUICK = Options(model="tiny", nodes=(2,), sessions=(1, 4), runs=1, new_tokens=8, long_prompt=200)
START_TIMEOUT_S = 60.0


def run(options: Options) -> list[dict[str, Any]]:
    """Per number of daemons, a row for each number of sessions and one with a prefill."""
    per_session = options.prompt_tokens + options.new_tokens
    cache_tokens = 2 * max(options.sessions) * per_session + 4 * options.long_prompt + 8192
    rows = []
    with model_folder(options) as folder:
        local = load_local(folder, options)
        for threads, nodes in product(options.threads, options.nodes):
            with open_swarm(folder, options, nodes, cache_tokens, threads) as swarm:
                rows += [row | {"threads": threads} for row in measure(swarm, local, options)]
    show([row for row in rows if "sessions" in row], options)
    if options.long_prompt:
        show_disturbance([row for row in rows if "sessions" not in row], options)
    return rows


def measure(swarm: Swarm, local: Any, options: Options) -> list[dict[str, Any]]:
    prompts = [
        random_prompt(local, options.prompt_tokens, options.seed + number)
        for number in range(max(options.sessions))
    ]
    for model in (local, swarm.model):
        generate(model, prompts[0], 2)  # joins the swarm, touches all memory once
    alone: list[Generation] = []
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in options.sessions}
    disturbed = []
    expected: dict[int, tuple[int, ...]] = {}
    for _ in range(options.runs):
        alone.append(generate(local, prompts[0], options.new_tokens))
        expected[0] = alone[0].tokens
        for count in options.sessions:
            runs[count].append(measure_once(swarm, prompts[:count], options.new_tokens, expected))
        if options.long_prompt:
            disturbed.append(disturb(swarm.model, options))
    rows = [summarize(swarm, count, runs, alone) for count in options.sessions]
    if disturbed:
        rows.append(summarize_disturbance(disturbed) | {"nodes": len(swarm.nodes)})
    return rows


def measure_once(
    swarm: Swarm,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    expected: dict[int, tuple[int, ...]],
) -> dict[str, Any]:
    """All prompts at once. `expected` has each prompt's tokens so far seen; it takes new ones."""
    barrier = Barrier(len(prompts) + 1)

    def one(prompt: torch.Tensor) -> Generation:
        barrier.wait(START_TIMEOUT_S)
        return generate(swarm.model, prompt, new_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(one, prompt) for prompt in prompts]
        barrier.wait(START_TIMEOUT_S)
        before, started = Usage.now(swarm.nodes), time.perf_counter()
        generations = [future.result() for future in futures]
    seconds = time.perf_counter() - started
    used = Usage.now(swarm.nodes).since(before)
    gaps_s = [gap for generation in generations for gap in generation.gaps_s]
    first_s = [generation.first_token_s for generation in generations]
    differ = sum(
        expected.setdefault(number, generation.tokens) != generation.tokens
        for number, generation in enumerate(generations)
    )
    return {
        "seconds": seconds,
        "tokens_per_s": len(prompts) * new_tokens / seconds,
        "first_token_p50_s": percentile(first_s, 50),
        "first_token_p99_s": percentile(first_s, 99),
        "gap_p50_s": percentile(gaps_s, 50),
        "gap_p99_s": percentile(gaps_s, 99),
        "sessions_that_differ": differ,
        **used,
    }


def summarize(
    swarm: Swarm,
    count: int,
    runs: dict[int, list[dict[str, Any]]],
    alone: Sequence[Generation],
) -> dict[str, Any]:
    rates = {number: [one["tokens_per_s"] for one in of] for number, of in runs.items()}
    local = [one.tokens_per_s for one in alone]
    return {
        "nodes": len(swarm.nodes),
        "spans": swarm.spans,
        "sessions": count,
        "tokens_per_s": median(rates[count]),
        "local_tokens_per_s": median(local),
        "ratio_to_local": median_ratio(rates[count], local),
        "ratio_to_sessions": {
            number: median_ratio(rates[count], rates[number]) for number in runs if number < count
        },
        "sessions_that_differ": max(one["sessions_that_differ"] for one in runs[count]),
        "runs": runs[count],
        "local_runs": [one.as_json() for one in alone],
    }


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    def ms(row: dict[str, Any], key: str) -> str:
        return f"{median(one[key] for one in row['runs']) * 1000:.0f}"

    def client_share(row: dict[str, Any]) -> float:
        share: float = median(one["client_cpu_s"] / one["seconds"] for one in row["runs"])
        return share

    headings = (
        "nodes|threads|sessions|tokens/s|ratio\nto local|ratio to\nfewer sessions|differ|"
        "first token\np50 ms|\np99 ms|gap\np50 ms|\np99 ms|client\nCPU %"
    )
    cells = [
        (
            str(row["nodes"]),
            name_of_threads(row["threads"]),
            str(row["sessions"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio_to_local']:.2f}",
            ", ".join(f"{ratio:.2f} ({n})" for n, ratio in row["ratio_to_sessions"].items()),
            str(row["sessions_that_differ"]),
            ms(row, "first_token_p50_s"),
            ms(row, "first_token_p99_s"),
            ms(row, "gap_p50_s"),
            ms(row, "gap_p99_s"),
            f"{client_share(row) * 100:.0f}",
        )
        for row in rows
    ]
    print_table(f"concurrency: {options.model}, {options.dtype}", headings, cells)
