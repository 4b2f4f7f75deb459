"""Steps of one token through a checkout's own swarm, a few whenever stdin has a line.

Run by tests/house/speed.py with the checkout as folder and PYTHONPATH: `python hop_turns.py NODES`.
Prints `ready`, then for each line the median seconds of a step. It uses names of `benchmarks` that
both checkouts have.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from statistics import median

import torch

from benchmarks.hop import CACHE_TOKENS, DEFAULTS, TURN_STEPS
from benchmarks.models import model_folder
from benchmarks.swarms import open_swarm, torch_threads


def main(nodes: int) -> None:
    with model_folder(DEFAULTS) as folder, torch_threads(1), ExitStack() as stack:
        swarm = stack.enter_context(open_swarm(folder, DEFAULTS, nodes, CACHE_TOKENS, threads=1))
        session = stack.enter_context(
            swarm.model.inference_session(DEFAULTS.new_tokens + TURN_STEPS)
        )
        hidden_11D = torch.randn(1, 1, session.ends.hidden_size)
        print("ready", flush=True)
        for turn, _ in enumerate(sys.stdin):
            if turn % (DEFAULTS.new_tokens // TURN_STEPS) == 0:
                session.rollback([0] * session.rows)
            times = []
            for _ in range(TURN_STEPS):
                started = time.perf_counter()
                session.step(hidden_11D)
                times.append(time.perf_counter() - started)
            print(median(times), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
