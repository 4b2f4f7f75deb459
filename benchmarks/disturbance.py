"""One session decodes while another one prefills a long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from threading import Event
from typing import Any

from benchmarks.figures import percentile
from benchmarks.generation import TokenTimes, generate
from benchmarks.models import random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import name_of_threads

CALM_TOKENS = 48
MOST_TOKENS = 4096
"""The session that decodes ends with the prefill, long before these."""
TIMEOUT_S = 300.0


def disturb(model: Any, options: Options) -> dict[str, Any]:
    """The waits for a token before and during the prefill, of the session that decodes."""
    calm, over = Event(), Event()
    short = random_prompt(model, options.prompt_tokens, options.seed)
    long = random_prompt(model, options.long_prompt, options.seed + 1)
    times = TokenTimes(lambda count: calm.set() if count > CALM_TOKENS else None)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(
            generate, model, short, MOST_TOKENS, stop_when=over.is_set, times=times
        )
        try:
            while not calm.wait(0.1) and not decoding.done():
                pass
            prefill = generate(model, long, 1)
        finally:
            over.set()
        decoding.result(TIMEOUT_S)
    waits = list(pairwise(times.times))
    before = [b - a for a, b in waits if b <= prefill.started]
    during = [b - a for a, b in waits if b > prefill.started and a < prefill.ended]
    return {
        "prefill_s": prefill.seconds,
        "calm_gap_p50_s": percentile(before, 50),
        "calm_gap_p99_s": percentile(before, 99),
        "gap_p50_s": percentile(during, 50),
        "gap_p99_s": percentile(during, 99),
        "gaps_during": len(during),
        "p99_to_calm_p50": percentile(during, 99) / percentile(before, 50),
    }


def summarize_disturbance(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "p99_to_calm_p50": median(one["p99_to_calm_p50"] for one in runs),
        "runs": list(runs),
    }


def show_disturbance(rows: Sequence[dict[str, Any]], options: Options) -> None:
    def ms(row: dict[str, Any], key: str) -> str:
        return f"{median(one[key] for one in row['runs']) * 1000:.0f}"

    title = f"a session while another prefills {options.long_prompt} tokens"
    headings = (
        "nodes|threads|calm gap\np50 ms|\np99 ms|gap then\np50 ms|\np99 ms|p99 then to\ncalm p50|"
        "prefill s"
    )
    keys = ("calm_gap_p50_s", "calm_gap_p99_s", "gap_p50_s", "gap_p99_s")
    cells = [
        (
            str(row["nodes"]),
            name_of_threads(row["threads"]),
            *(ms(row, key) for key in keys),
            f"{row['p99_to_calm_p50']:.2f}",
            f"{median(one['prefill_s'] for one in row['runs']):.1f}",
        )
        for row in rows
    ]
    print_table(title, headings, cells)
