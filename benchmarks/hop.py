"""What one more node in the chain adds to the time of a one-token step.

The model has the hidden size of a real one (1024) and next to no work in its six blocks. The same
six blocks are run by 1, 2, 3 daemons, so that the compute of a step is the same however it is cut,
and what a step through k daemons takes longer than one through a single daemon is k - 1 hops:
encoding, two p2pds, the event loop, the device's thread, decoding. All swarms run at once and take
turns of a few steps; steps carry hidden states, so that embedding and head take no part.

Each percentile is compared with the same one of the undivided steps, but for p99, which is that of
single steps against the undivided median: what a hop adds at its worst, the noise of the whole
chain included. On a noisy machine the p10, the steps that nothing else disturbed, and the processor
time that a hop takes of the daemons and their p2pds say most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.figures import percentile
from benchmarks.footprint import nodes_cpu_s
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import Swarm, open_local, open_swarm, torch_threads
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.core.ids import Span
from nesa_node.engine.model.devices import measure_throughput
from nesa_node.engine.model.loading import load_blocks

DEFAULTS = Options(model="thin", new_tokens=400)
QUICK = Options(model="thin", nodes=(1, 2), runs=1, new_tokens=40)
TURN_STEPS = 20
PERCENTS = (10, 50, 99)
CACHE_TOKENS = 4096


def run(options: Options) -> list[dict[str, Any]]:
    """One row per number of daemons; `new_tokens` are the steps of a run, `nodes` begins with 1."""
    if options.nodes[0] != 1 or len(options.nodes) == 1:
        raise ValueError("hop compares with one daemon: --nodes 1,2,...")
    with model_folder(options) as folder, torch_threads(1), ExitStack() as stack:
        compute_s = compute_time(folder, options)
        swarms = {
            nodes: stack.enter_context(open_swarm(folder, options, nodes, CACHE_TOKENS, threads=1))
            for nodes in options.nodes
        }
        sessions = {
            nodes: stack.enter_context(
                swarm.model.inference_session(options.new_tokens + TURN_STEPS)
            )
            for nodes, swarm in swarms.items()
        }
        take_turns(sessions, TURN_STEPS)  # touches all memory once
        runs = [measure_once(swarms, sessions, options.new_tokens) for _ in range(options.runs)]
    rows = [
        {"nodes": nodes, "compute_s": compute_s, "runs": [one[nodes] for one in runs]}
        for nodes in options.nodes
    ]
    for row in rows:
        of: Any = row["runs"]
        row |= {key: median(one[key] for one in of) for key in of[0]}
    show(rows, options)
    return rows


def compute_time(folder: Path, options: Options) -> float:
    """Seconds that a step of one token takes in this process, without any network."""
    checkpoint = open_local(folder)
    span = Span(0, checkpoint.num_blocks)
    blocks = load_blocks(checkpoint, span, dtype=options.torch_dtype, device="cpu")
    return 1 / measure_throughput(blocks).decode_tokens_per_s


def measure_once(
    swarms: Mapping[int, Swarm], sessions: Mapping[int, InferenceSession], steps: int
) -> dict[int, dict[str, float]]:
    before = {nodes: nodes_cpu_s(swarm.nodes) for nodes, swarm in swarms.items()}
    times = take_turns(sessions, steps)
    cpu_s = {
        nodes: (nodes_cpu_s(swarm.nodes) - before[nodes]) / len(times[nodes])
        for nodes, swarm in swarms.items()
    }
    return added_time(times, cpu_s)


def take_turns(sessions: Mapping[int, InferenceSession], steps: int) -> dict[int, list[float]]:
    """Seconds of each step, per number of daemons, all sessions beginning empty."""
    times: dict[int, list[float]] = {nodes: [] for nodes in sessions}
    for session in sessions.values():
        session.rollback([0] * session.rows)
    hidden_11D = torch.randn(1, 1, next(iter(sessions.values())).ends.hidden_size)
    while len(times[1]) < steps:
        for nodes, session in sessions.items():
            for _ in range(TURN_STEPS):
                started = time.perf_counter()
                session.step(hidden_11D)
                times[nodes].append(time.perf_counter() - started)
    return times


def added_time(
    times: Mapping[int, Sequence[float]], cpu_s: Mapping[int, float]
) -> dict[int, dict[str, float]]:
    """Per number of daemons: seconds of a step, and what each hop after the first adds."""
    alone = {percent: percentile(times[1], percent) for percent in (10, 50)}
    added = {}
    for nodes, steps in times.items():
        of = {percent: percentile(steps, percent) for percent in PERCENTS}
        added[nodes] = {f"step_p{percent}_s": of[percent] for percent in PERCENTS}
        added[nodes]["step_cpu_s"] = cpu_s[nodes]
        if nodes > 1:
            added[nodes] |= {
                f"hop_p{percent}_s": (of[percent] - alone[min(percent, 50)]) / (nodes - 1)
                for percent in PERCENTS
            }
            added[nodes]["hop_cpu_s"] = (cpu_s[nodes] - cpu_s[1]) / (nodes - 1)
    return added


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    def ms(row: dict[str, Any], key: str) -> str:
        return f"{row[key] * 1000:.2f}" if key in row else ""

    headings = (
        "nodes|compute ms|step p10 ms|p50 ms|p99 ms|CPU ms|"
        "each hop adds\np10 ms|\np50 ms|\np99 ms|\nCPU ms"
    )
    figures = (*(f"p{percent}" for percent in PERCENTS), "cpu")
    keys = ["compute_s", *(f"{of}_{figure}_s" for of in ("step", "hop") for figure in figures)]
    cells = [(str(row["nodes"]), *(ms(row, key) for key in keys)) for row in rows]
    print_table(f"hop: one token of hidden size 1024, {options.dtype}", headings, cells)
