"""One session decodes while a fine-tuning session trains on the same node.

The client that trains is a process of its own at the lowest priority, since it stands for another
machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import torch

from benchmarks.figures import percentile
from benchmarks.generation import TokenTimes, generate
from benchmarks.models import model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import open_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.finetuning_session import FinetuningOptions

DEFAULTS = Options(model="250m", nodes=(1, 3), threads=(1,), runs=5, seconds=15.0)
QUICK = Options(model="tiny", nodes=(1,), threads=(1,), runs=1, seconds=2.0)
MICRO_BATCHES = 4
TRAINED_TOKENS = 512
"""Of a micro-batch."""
MOST_TOKENS = 4096
CACHE_TOKENS = 8192


def run(options: Options) -> list[dict[str, Any]]:
    with model_folder(options) as folder:
        rows = [measure(folder, options, nodes) for nodes in options.nodes]
    show(rows)
    return rows


def measure(folder: Path, options: Options, nodes: int) -> dict[str, Any]:
    with open_swarm(folder, options, nodes, CACHE_TOKENS, threads=1) as swarm:
        addresses = [node.addresses[0] for node in swarm.nodes]
        runs = [measure_once(swarm.model, folder, addresses, options) for _ in range(options.runs)]
    return {
        "nodes": nodes,
        "p99_to_calm_p50": median(each["gap_p99_s"] / each["calm_gap_p50_s"] for each in runs),
        "p50_to_calm_p50": median(each["gap_p50_s"] / each["calm_gap_p50_s"] for each in runs),
        "runs": runs,
    }


def measure_once(
    model: Any, folder: Path, addresses: list[str], options: Options
) -> dict[str, Any]:
    """Waits for a token for `options.seconds` alone, and then beside the training."""
    over, sessions = Event(), [TokenTimes(lambda _: None)]
    prompt = random_prompt(model, options.prompt_tokens, options.seed)

    def decode() -> None:
        while not over.is_set():
            generate(model, prompt, MOST_TOKENS, stop_when=over.is_set, times=sessions[-1])
            sessions.append(TokenTimes(lambda _: None))

    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(decode)
        try:
            while len(sessions[0].times) < 2 and not decoding.done():
                time.sleep(0.01)
            began = time.perf_counter()
            time.sleep(options.seconds)
            calm_ended = time.perf_counter()
            with training(folder, addresses) as steps:
                next(steps)  # adapters are made, and the first step is over
                trained_from = time.perf_counter()
                tokens = 0
                for line in steps:
                    tokens += json.loads(line)["tokens"]
                    if time.perf_counter() - trained_from > options.seconds:
                        break
                trained_to = time.perf_counter()
        finally:
            over.set()
        decoding.result()
    waits = [wait for each in sessions for wait in pairwise(each.times)]
    calm = [b - a for a, b in waits if began < a and b < calm_ended]
    beside = [b - a for a, b in waits if trained_from < b and a < trained_to]
    return {
        "calm_gap_p50_s": percentile(calm, 50),
        "calm_gap_p99_s": percentile(calm, 99),
        "gap_p50_s": percentile(beside, 50),
        "gap_p99_s": percentile(beside, 99),
        "gaps": len(beside),
        "trained_tokens_per_s": tokens / (trained_to - trained_from),
    }


@contextmanager
def training(folder: Path, addresses: list[str]) -> Iterator[Iterator[str]]:
    """A process that trains; yields a line for each step."""
    arguments = [sys.executable, "-m", "benchmarks.training_load", str(folder), *addresses]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
        finally:
            process.terminate()


def train(folder: str, addresses: list[str]) -> None:
    """Train for ever, and print a line after each step."""
    import peft

    os.nice(19)
    torch.set_num_threads(1)
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(
            peft.LoraConfig(r=8, target_modules="all-linear"),
            options=FinetuningOptions(max_tokens=TRAINED_TOKENS),
        ) as session,
    ):
        vocabulary = int(model.config.vocab_size)
        while True:
            ids_RL = torch.randint(vocabulary, (2 * MICRO_BATCHES, TRAINED_TOKENS // 2))
            result = session.step({"input_ids": ids_RL, "labels": ids_RL})
            print(json.dumps({"tokens": result.num_tokens}), flush=True)


def show(rows: list[dict[str, Any]]) -> None:
    def ms(row: dict[str, Any], key: str) -> str:
        return f"{median(one[key] for one in row['runs']) * 1000:.1f}"

    print_table(
        "A session that decodes, alone and beside a fine-tuning session on the same nodes",
        "nodes|alone\np50 ms|\np99 ms|beside it\np50 ms|\np99 ms|p99 beside\nto p50 alone|trained\n"
        "tokens/s",
        [
            (
                str(row["nodes"]),
                *(
                    ms(row, key)
                    for key in ("calm_gap_p50_s", "calm_gap_p99_s", "gap_p50_s", "gap_p99_s")
                ),
                f"{row['p99_to_calm_p50']:.2f}",
                f"{median(one['trained_tokens_per_s'] for one in row['runs']):.0f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    # So that it leaves the session and its temporary folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    train(sys.argv[1], sys.argv[2:])
