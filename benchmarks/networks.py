"""Requests per second through three pieces of a network, against its slowest piece alone.

Three daemons of one thread each hold a piece; the second and third run for three fifths of the
time. The first has a core of its own, all other processes share the rest. The plan is the best one
for machines of which the first is eight times as fast, so that its piece is the slowest, and two
cores are enough for all. Eight requests are on their way at once, through all pieces, and in turns
with that at the first node alone. What the nodes announce, of what they have served, predicts the
same: the slowest of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from torch import Tensor

from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import READY_TIMEOUT_S, torch_threads
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.client.graphs.graph_connection import GraphConnection
from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.ids import Span
from nesa_node.engine.graphs.model_graph import RequestSizes, example_inputs
from nesa_node.engine.graphs.network import Network, make_plan
from nesa_node.engine.weights.families import read_network_config
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.sharding.graph_plan import encode_plan
from nesa_node.sharding.operation_graph import Machine
from nesa_node.sharding.slicing import slice_order

DEFAULTS = Options(nodes=(3,), threads=(1,), sessions=(8,), runs=5, seconds=10)
"""`sessions` are requests at once, `seconds` those of each measurement. Networks have their
published dimensions, but for `--model tiny`."""
QUICK = Options(model="tiny", nodes=(3,), threads=(1,), sessions=(8,), runs=1, seconds=1)
HF: Any = transformers
SPEEDS = 8, 1, 1
RUNNING = 1.0, 0.6, 0.6
PERIOD_S = 0.02
SLOWEST = 0
"""The first piece, which gets the network's inputs alone."""
MACHINE = Machine(flop_per_s=1e10, moved_bytes_per_s=2e9, link_bytes_per_s=2e8)
"""For speed 1: an eighth of one core of a server, and a link between daemons on one machine."""
BERT: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
    "published": {},
}
RESNET: dict[str, dict[str, Any]] = {
    "tiny": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "published": {},
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests per second."""

    through_all: float
    slowest_alone: float


def run(options: Options) -> list[dict[str, Any]]:
    torch.manual_seed(options.seed)
    size, hf = "tiny" if options.model == "tiny" else "published", HF
    models: list[Callable[[], Any]] = [
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**BERT[size])),
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT[size])),
        lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET[size])),
    ]
    with torch_threads(1):
        rows = [measure(make(), options) for make in models]
    cells = [
        [
            row["network"],
            f"{row['through_all']:.2f}",
            f"{row['slowest_alone']:.2f}",
            f"{row['share_of_slowest']:.3f}",
            f"{row['predicted']:.2f}",
            f"{row['predicted_of_measured']:.3f}",
        ]
        for row in rows
    ]
    headings = "network|through all|slowest alone|share|predicted|of measured"
    print_table("requests/s", headings, cells)
    return rows


def measure(model: Any, options: Options) -> dict[str, Any]:
    with TemporaryDirectory(prefix="nesa-bench-") as temporary:
        folder = Path(temporary)
        model.save_pretrained(folder / "model")
        plan = folder / "plan.json"
        plan.write_bytes(uneven_plan(folder / "model", is_tiny=options.model == "tiny"))
        spans = [Span(index, index + 1) for index in range(len(SPEEDS))]
        flags = ["--plan", str(plan), "--threads", "1", "--log-level", "warning"]
        with (
            local_swarm(
                folder / "model", spans, folder, flags=flags, ready_timeout_s=READY_TIMEOUT_S
            ) as nodes,
            RemoteNetwork.from_pretrained(
                folder / "model", initial_peers=[nodes[0].addresses[0]]
            ) as remote,
        ):
            connection = remote.connection
            inputs = example_inputs(connection.network.model, RequestSizes())
            given = {name: each for name, each in inputs.items() if isinstance(each, Tensor)}
            work = partial(measure_rates, connection, given, options)
            daemons = [node.process.pid for node in nodes]
            with core_of_its_own(daemons[SLOWEST]), slowed_down(daemons):
                runs = [remote._loop.run(work()) for _ in range(options.runs + 1)]
            runs = runs[1:]  # the first one allocates
            predicted = remote._loop.run(predict(connection))
    through_all = median(each.through_all for each in runs)
    return {
        "network": type(model).__name__,
        "through_all": through_all,
        "slowest_alone": median(each.slowest_alone for each in runs),
        "share_of_slowest": median(each.through_all / each.slowest_alone for each in runs),
        "predicted": predicted,
        "predicted_of_measured": predicted / through_all,
        "runs": [
            {"through_all": each.through_all, "slowest_alone": each.slowest_alone} for each in runs
        ],
    }


def uneven_plan(folder: Path, *, is_tiny: bool) -> bytes:
    """Pieces of the network's own order for machines of `SPEEDS`.

    A tiny network is cut as if links cost nothing: the fastest machine would get all of it.
    """
    checkpoint = open_checkpoint(str(folder), cache_dir=folder, read=read_network_config)
    sizes = RequestSizes()
    captured = Network(checkpoint, torch.float32, sizes).captured
    machines = [
        replace(
            MACHINE,
            flop_per_s=speed * MACHINE.flop_per_s,
            moved_bytes_per_s=speed * MACHINE.moved_bytes_per_s,
            link_bytes_per_s=1e15 if is_tiny else MACHINE.link_bytes_per_s,
        )
        for speed in SPEEDS
    ]
    sliced = slice_order(captured.graph, np.arange(len(captured.graph)), machines)
    return encode_plan(make_plan(captured, sliced.blocks(), torch.float32, sizes))


@contextmanager
def core_of_its_own(daemon: int) -> Iterator[None]:
    """Let `daemon` alone use the first core; without effect where there is one, or on macOS."""
    if not hasattr(os, "sched_setaffinity") or len(cores := os.sched_getaffinity(0)) < 2:
        yield
        return
    first = {min(cores)}
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    try:
        for process in processes:
            _keep_on(process.pid, first if process.pid == daemon else cores - first)
        yield
    finally:
        _keep_on(os.getpid(), cores)


def _keep_on(process: int, cores: set[int]) -> None:
    """Have all threads of a process run on these cores, and those that they start."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@contextmanager
def slowed_down(daemons: Sequence[int]) -> Iterator[None]:
    """Let each process run for its share of `RUNNING` of the time."""
    ending = Event()

    def throttle(pid: int, share: float) -> None:
        while not ending.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep((1 - share) * PERIOD_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(share * PERIOD_S)

    with ThreadPoolExecutor(len(daemons)) as pool:
        slow = [each for each in zip(daemons, RUNNING, strict=True) if each[1] < 1]
        throttling = [pool.submit(throttle, pid, share) for pid, share in slow]
        try:
            yield
        finally:
            ending.set()
            for each in throttling:
                each.result()


async def measure_rates(
    connection: GraphConnection, inputs: dict[str, Tensor], options: Options
) -> Rates:
    values, sizes = connection.network.bind(inputs)
    await connection.run(inputs)
    span = Span(SLOWEST, SLOWEST + 1)
    (hop,) = [each for each in connection._hops if each.span == span]
    link = await connection._find_link(hop.peer_id)
    interface = connection._find_interface(span)
    given = {index: values[index] for index in interface.received}
    alone = partial(link.run, span, sizes, given, 1 << 30)
    in_flight = options.sessions[0]
    return Rates(
        await count_per_s(partial(connection.run, inputs), in_flight, options.seconds),
        await count_per_s(alone, in_flight, options.seconds),
    )


async def count_per_s(work: Callable[[], Awaitable[Any]], in_flight: int, seconds: float) -> float:
    """Answers per second with `in_flight` requests at once, after each has been answered."""
    times: list[float] = []
    started = time.perf_counter()

    async def send() -> None:
        while time.perf_counter() - started < seconds:
            await work()
            times.append(time.perf_counter())

    await asyncio.gather(*(send() for _ in range(in_flight)))
    settled = times[in_flight:] if len(times) > 2 * in_flight else times
    counted = [each for each in settled if each - started < seconds] or settled
    return (len(counted) - 1) / max(counted[-1] - counted[0], 1e-9)


async def predict(connection: GraphConnection) -> float:
    """What the slowest node announces."""
    records = await connection._swarm.directory.fetch_all()
    return min(each.prefill_tokens_per_s for each in records)
