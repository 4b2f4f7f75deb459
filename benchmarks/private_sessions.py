"""Private sessions at once, and a plain session beside them: tokens a second, of each.

Two daemons serve both kinds. Four private sessions of one client generate from prompts of their
own, and their tokens have to be those that each gets alone; a plain session of another client
generates alone, and while they do. The private client is a process with the lowest priority: it
stands for other machines, whose encryption takes nothing of a node's time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.models import load_local, model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags, join, open_local, torch_threads
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import split_evenly

DEFAULTS = Options(model="demo", threads=(1,), runs=5, new_tokens=3)
QUICK = Options(model="tiny", threads=(1,), runs=1, new_tokens=2)

SESSIONS = 4
PROMPT_TOKENS = 2
SCHEME = "ckks"
PLAIN_TOKENS = 32
"""Of a plain session."""


def run(options: Options) -> list[dict[str, Any]]:
    flags = [*daemon_flags(options, 4096, options.threads[0]), "--private", SCHEME]
    with (
        torch_threads(options.threads[0]),
        model_folder(options) as folder,
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder,
            split_evenly(open_local(folder).num_blocks, 2),
            Path(temporary),
            flags=flags,
            ready_timeout_s=READY_TIMEOUT_S,
        ) as daemons,
    ):
        peers = [node.addresses[0] for node in daemons]
        vocabulary = load_local(folder, options)
        prompts = [random_prompt(vocabulary, PROMPT_TOKENS, seed) for seed in range(SESSIONS)]
        ours, its = Pipe()
        client = get_context("spawn").Process(
            target=_run_client,
            # Tensors would pass through shared memory, whose manager stays.
            args=(its, str(folder), peers, [each.tolist() for each in prompts], options.new_tokens),
        )
        client.start()
        try:
            with join(folder, options, peers) as plain:
                rows = [_measure(ours, plain, prompts, options) for _ in range(options.runs + 1)]
        finally:
            ours.send(0)
            client.join()
    rows = rows[1:]  # the first one waits for weights to be encoded
    names = ("one", "four", "plain", "plain_beside")
    row: dict[str, Any] = {
        "what": f"{options.model}, {SCHEME}",
        **{name: median(each[name] for each in rows) for name in names},
        "four_to_one": median(each["four"] / each["one"] for each in rows),
        "beside_to_alone": median(each["plain_beside"] / each["plain"] for each in rows),
        "runs": rows,
    }
    show(row)
    return [row]


def _measure(
    private: Connection,
    plain: DistributedModelForCausalLM,
    prompts: Sequence[torch.Tensor],
    options: Options,
) -> dict[str, float]:
    """Tokens a second."""
    count = len(prompts) * options.new_tokens
    private.send(1)
    one_s, alone = private.recv()
    plain_alone = _plain_speed(plain, prompts[0])
    private.send(SESSIONS)
    four_s, together = private.recv()
    assert together == alone
    private.send(SESSIONS)
    beside = []
    while not private.poll():
        beside.append(_plain_speed(plain, prompts[0]))
    private.recv()
    return {
        "one": count / one_s,
        "four": count / four_s,
        "plain": plain_alone,
        # The last one goes on alone.
        "plain_beside": median(beside[:-1] or beside),
    }


def _run_client(
    commands: Connection,
    folder: str,
    peers: Sequence[str],
    prompts: Sequence[list[list[int]]],
    count: int,
) -> None:
    """For each number that comes: generate from all prompts, so many at once; answer with seconds
    and tokens. 0 ends.
    """
    os.nice(19)
    torch.set_num_threads(1)
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder, initial_peers=peers, dtype=torch.float32, private=SCHEME
    ) as model:
        while at_once := commands.recv():
            started = time.perf_counter()
            with ThreadPoolExecutor(at_once) as threads:
                tokens = list(
                    threads.map(lambda ids: _generate(model, torch.tensor(ids), count), prompts)
                )
            commands.send((time.perf_counter() - started, [each.tolist() for each in tokens]))


def _generate(model: DistributedModelForCausalLM, prompt: torch.Tensor, count: int) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return tokens


def _plain_speed(model: DistributedModelForCausalLM, prompt: torch.Tensor) -> float:
    started = time.perf_counter()
    _generate(model, prompt, PLAIN_TOKENS)
    return PLAIN_TOKENS / (time.perf_counter() - started)


def show(row: dict[str, Any]) -> None:
    print_table(
        "Private sessions at once, and a plain one beside them, tokens/s",
        "what|one|four|four\nto one|plain\nalone|beside\nfour|beside\nto alone",
        [
            [
                row["what"],
                *(f"{row[name]:.2f}" for name in ("one", "four", "four_to_one")),
                *(f"{row[name]:.2f}" for name in ("plain", "plain_beside", "beside_to_alone")),
            ]
        ],
    )
