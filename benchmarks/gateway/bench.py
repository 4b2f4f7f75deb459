"""Three daemons, a gateway before them, and many clients that stream.

Within a run the SDK and the gateway take turns; then all clients stream for `seconds`, and each
text is compared with the one that the client got alone; then clients leave in the middle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.figures import percentile
from benchmarks.footprint import memory_of
from benchmarks.gateway.occupancy import occupancy, wait_until_free
from benchmarks.gateway.process import Gateway, free_port, open_gateway
from benchmarks.gateway.stream import Streamed, request_body, stream, stream_until
from benchmarks.generation import generate
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import daemon_flags, join, open_local
from nesa_node.cli.services.local_swarm import LocalNode, start_node, wait_until_serving
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import split_evenly
from nesa_node.engine.weights.tokenizer import load_tokenizer

DEFAULTS = Options(model="demo", nodes=(3,), sessions=(64, 200), runs=5, new_tokens=32, seconds=120)
QUICK = Options(model="demo", nodes=(2,), sessions=(4, 8), runs=1, new_tokens=8, seconds=5)
COME_S = 180.0
FREE_S = 30.0
COUNTS = ("clients", "served", "streams", "failed", "cut_short", "differ")
LEAST_STREAMING = 48
"""So many clients have text before all leave; the others wait for room or for their turn."""
SUBJECTS = ["lighthouse", "violin", "glacier", "compass", "beehive", "kitchen", "clock", "river"]
PLACES = ["north", "city", "island", "night", "winter", "past", "harbour", "school"]


def run(options: Options) -> list[dict[str, Any]]:
    """A row for the overhead, one for the load, one for those who leave."""
    torch.set_num_threads(1)
    with (
        model_folder(options) as folder,
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        ExitStack() as stack,
    ):
        nodes, ports = start_daemons(stack, folder, Path(temporary), options)
        peers = [node.addresses[0] for node in nodes]
        log = Path(temporary) / "gateway.log"
        gateway = stack.enter_context(open_gateway(folder, peers, log, api_flags(options)))
        model = stack.enter_context(join(folder, options, peers))
        rows = [measure_overhead(gateway, model, folder, options)]
        model.close()
        rows.append(measure_load(gateway, nodes, options))
        rows.append(measure_leaving(gateway, ports, options))
    show(rows)
    return rows


def start_daemons(
    stack: ExitStack, folder: Path, temporary: Path, options: Options
) -> tuple[list[LocalNode], list[int]]:
    """Each with the address of its metrics, beside which the nodes are returned."""
    spans = split_evenly(open_local(folder).num_blocks, options.nodes[0])
    cache_tokens = 2 * max(options.sessions) * (256 + options.new_tokens)
    ports = [free_port() for _ in spans]
    nodes: list[LocalNode] = []
    for number, (span, port) in enumerate(zip(spans, ports, strict=True), start=1):
        flags = [*daemon_flags(options, cache_tokens), "--metrics", f"127.0.0.1:{port}"]
        if nodes:
            flags += ["--initial-peers", *nodes[0].addresses]
        node = start_node(stack, folder, f"node-{number}", span, temporary, flags)
        nodes.append(wait_until_serving(node, time.monotonic() + 300))
    return nodes, ports


def api_flags(options: Options) -> list[str]:
    return ["--torch-dtype", options.dtype, "--threads", "1", "--log-level", "warning"]


def prompts(count: int) -> list[str]:
    """All different; each long enough to be a prompt."""
    pairs = [(subject, place) for place in PLACES for subject in SUBJECTS]
    texts = [f"Here is a short tale of a {a} and the {b}. " for a, b in pairs]
    return [texts[i % len(texts)] + "It begins. " * (i // len(texts)) for i in range(count)]


def measure_overhead(
    gateway: Gateway, model: DistributedModelForCausalLM, folder: Path, options: Options
) -> dict[str, Any]:
    """The median wait for a token of one stream, over HTTP and of the SDK, in turns."""
    tokenizer = load_tokenizer(folder)
    text, tokens = prompts(1)[0], 4 * options.new_tokens
    ids_1L = tokenizer(text, return_tensors="pt").input_ids
    body = request_body(gateway.model, text, tokens)
    generate(model, ids_1L, 2)
    stream(gateway.port, {**body, "max_tokens": 2})
    runs = []
    for _ in range(options.runs):
        sdk = median(generate(model, ids_1L, tokens).gaps_s)
        http = median(stream(gateway.port, body).gaps_s)
        runs.append({"sdk_gap_s": sdk, "gateway_gap_s": http, "overhead_s": http - sdk})
    return {
        "part": "overhead",
        "overhead_s": median(one["overhead_s"] for one in runs),
        "overhead_range_s": [of(one["overhead_s"] for one in runs) for of in (min, max)],
        "runs": runs,
    }


def measure_load(gateway: Gateway, nodes: Sequence[LocalNode], options: Options) -> dict[str, Any]:
    """Clients that ask again and again, each for its own text, against what each got alone."""
    bodies = [
        request_body(gateway.model, text, options.new_tokens)
        for text in prompts(options.sessions[0])
    ]
    alone = [stream(gateway.port, body).text for body in bodies]
    stopping = threading.Event()
    done: list[list[Streamed]] = [[] for _ in bodies]
    failures: list[str] = []

    def client(number: int) -> None:
        while not stopping.is_set():
            try:
                done[number].append(stream(gateway.port, bodies[number]))
            except (OSError, ValueError) as error:
                failures.append(f"client {number}: {error!r}")
                time.sleep(1)

    memory = []
    with ThreadPoolExecutor(len(bodies)) as pool:
        clients = [pool.submit(client, number) for number in range(len(bodies))]
        ends = time.monotonic() + options.seconds
        while time.monotonic() < ends:
            time.sleep(min(5.0, options.seconds / 2))
            memory.append({"gateway": gateway.uss_bytes(), "nodes": uss_of(nodes)})
        stopping.set()
        for one in clients:
            one.result()
    texts = [[one.text for one in streams] for streams in done]
    gaps_s = [gap for streams in done for one in streams for gap in one.gaps_s]
    cut = sum(one.finish_reason is None for streams in done for one in streams)
    return {
        "part": "load",
        "clients": len(bodies),
        "streams": sum(map(len, texts)),
        "served": sum(bool(streams) for streams in texts),
        "failed": len(failures),
        "cut_short": cut,
        "differ": sum(text != alone[n] for n, streams in enumerate(texts) for text in streams),
        "gap_p50_s": percentile(gaps_s, 50),
        "gap_p99_s": percentile(gaps_s, 99),
        "failures": failures[:10],
        "memory": memory,
        "runs": [{"gaps_s": [one.gaps_s for one in streams]} for streams in done],
    }


def uss_of(nodes: Sequence[LocalNode]) -> int:
    return sum(memory_of(node)["uss_bytes"] for node in nodes)


def measure_leaving(gateway: Gateway, ports: Sequence[int], options: Options) -> dict[str, Any]:
    """All clients stream and leave together, some of them before their first token."""
    wait_until_free(ports, FREE_S)
    count = options.sessions[-1]
    gone, first = threading.Event(), threading.Semaphore(0)
    bodies = [request_body(gateway.model, text, 512) for text in prompts(count)]
    streaming = min(count, LEAST_STREAMING)
    with ThreadPoolExecutor(count) as pool:
        clients = [pool.submit(stream_until, gateway.port, body, gone, first) for body in bodies]
        try:
            for number in range(streaming):
                if not first.acquire(timeout=COME_S):
                    raise TimeoutError(f"only {number} clients come to stream")
            busy = occupancy(ports)
        finally:
            gone.set()
        left = time.perf_counter()
        for client in clients:
            client.result()
        last = time.perf_counter() - left
        free_s = wait_until_free(ports, FREE_S)
    return {
        "part": "leaving",
        "clients": count,
        "streaming": streaming,
        "sessions_before": busy[0],
        "cache_before": busy[1],
        "last_left_s": last,
        "free_s": free_s,
        "runs": [{"last_left_s": last, "free_s": free_s}],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    overhead, load, leaving = rows
    runs = overhead["runs"]
    low, high = overhead["overhead_range_s"]
    print_table(
        "one stream: median wait for a token; no overhead is shown where the range spans 0",
        "SDK ms|gateway ms|more ms|of all runs, ms",
        [
            [f"{median(one[key] for one in runs) * 1000:.1f}" for key in runs[0]]
            + [f"{low * 1000:+.1f} to {high * 1000:+.1f}"],
        ],
    )
    grown = [f"{_grown(load['memory'], who):+.1%}" for who in ("gateway", "nodes")]
    print_table(
        "many streams",
        "clients|served|streams|failed|cut short|differ|wait p50 ms|p99 ms|gateway USS|nodes USS",
        [
            [
                str(load[key])
                for key in ("clients", "served", "streams", "failed", "cut_short", "differ")
            ]
            + [f"{load[key] * 1000:.0f}" for key in ("gap_p50_s", "gap_p99_s")]
            + grown
        ],
    )
    print_table(
        "all leave in the middle",
        "clients|streaming|sessions on nodes|cache promised|free after s",
        [
            [str(leaving[key]) for key in ("clients", "streaming", "sessions_before")]
            + [f"{leaving['cache_before']:.0%}", f"{leaving['free_s']:.2f}"]
        ],
    )


def _grown(memory: Sequence[dict[str, int]], who: str) -> float:
    """The median of the last third against that of the second: what the first saw is warming up."""
    third = max(len(memory) // 3, 1)
    middle, last = memory[third : 2 * third] or memory, memory[-third:]
    return median(one[who] for one in last) / median(one[who] for one in middle) - 1
