"""How long the planners take for a swarm of thousands of nodes, and how much memory.

In a process of its own per size, so that peaks are its own: the snapshot, its homology (with
landmarks), a chain, a placement for latency and one for throughput, and what should move. The
snapshot is a made-up world, which takes longer than putting records together. "Required" are the
snapshot, its homology, a plan and a chain; on a machine that does other things, too, CPU seconds
say more than the clock. Memory is what the peak is above that of the process when all is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.footprint import peak_bytes
from benchmarks.options import Options
from benchmarks.results import print_table

DEFAULTS = Options(model="70b", nodes=(100, 1000, 5000), runs=1)
QUICK = Options(model="70b", nodes=(200,), runs=1)
BLOCKS = 80
PARTS = ("snapshot", "homology", "room", "chain", "place_latency", "place_throughput", "rebalance")


def run(options: Options) -> list[dict[str, Any]]:
    rows = []
    for nodes in options.nodes:
        argv = [sys.executable, "-m", "benchmarks.scale", str(nodes), str(options.seed)]
        runs = []
        for _ in range(options.runs):
            done = subprocess.run(argv, check=True, capture_output=True, text=True)
            runs.append(json.loads(done.stdout))
        rows.append(summarize(runs))
    show(rows)
    return rows


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of times and peaks; what was planned is the same in every run."""
    timed = ("required_s", "required_cpu_s", "peak_mb", "peak_with_rest_mb")
    return {
        **runs[0],
        **{key: median(one[key] for one in runs) for key in timed},
        **{
            key: {part: median(one[key][part] for one in runs) for part in PARTS}
            for key in ("seconds", "cpu_seconds")
        },
        "runs": [{key: one[key] for key in ("seconds", "cpu_seconds", *timed)} for one in runs],
    }


def measure(nodes: int, seed: int) -> dict[str, Any]:
    """One row, of this process."""
    import numpy as np

    from nesa_node.core.ids import Span
    from nesa_node.routing.chain_request import ChainRequest, build_problem
    from nesa_node.routing.placement.placement_problem import make_placement_problem
    from nesa_node.routing.placement.plan import plan_placement
    from nesa_node.routing.placement.rebalance import rebalance
    from nesa_node.routing.search.exact import solve_latency
    from nesa_node.topology.shape.merge_tree import network_filtration
    from nesa_node.topology.shape.network_shape import compute_shape
    from nesa_node.topology.simulation.world import make_world

    seconds: dict[str, float] = {}
    busy_s: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        started, busy = time.perf_counter(), time.process_time()
        yield
        seconds[part] = time.perf_counter() - started
        busy_s[part] = time.process_time() - busy

    before = peak_bytes()
    with timed("snapshot"):
        world = make_world(nodes, BLOCKS, np.random.default_rng(seed))
    request = ChainRequest(span=Span(0, BLOCKS), entry_rtt_ms=world.client_rtt_ms_CN[0])
    with timed("homology"):
        rtt_ms_NN = world.links.rtt_ms_NN
        shape = compute_shape(network_filtration(rtt_ms_NN / 1000.0))
    with timed("room"):
        make_placement_problem(world.snapshot, request)
    with timed("chain"):
        chain = solve_latency(build_problem(world.snapshot, request))
    with timed("place_latency"):
        quick = plan_placement(world.snapshot, request, goal="latency")
    peak = peak_bytes()
    with timed("place_throughput"):
        wide = plan_placement(world.snapshot, request, goal="throughput")
    with timed("rebalance"):
        moves = rebalance(world.snapshot, request)
    needed = ("snapshot", "homology", "chain", "place_latency")
    return {
        "nodes": nodes,
        "blocks": BLOCKS,
        "seconds": {part: round(seconds[part], 3) for part in PARTS},
        "cpu_seconds": {part: round(busy_s[part], 3) for part in PARTS},
        "required_s": round(sum(seconds[part] for part in needed), 3),
        "required_cpu_s": round(sum(busy_s[part] for part in needed), 3),
        "peak_mb": round((peak - before) / 1e6, 1),
        "peak_with_rest_mb": round((peak_bytes() - before) / 1e6, 1),
        "landmarks": len(shape.landmarks.node_K),
        "chain_s": chain.cost_s,
        "placed_latency_s": quick.latency_s,
        "latency_gap": quick.gap,
        "throughput_gap": wide.gap,
        "moves": len(moves.moves),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Planning for large swarms, 80 blocks",
        "nodes|"
        + "|".join(part.replace("_", "\n") for part in PARTS)
        + "|required\ns|its CPU\ns|peak\nMB",
        [
            [
                str(row["nodes"]),
                *(f"{row['seconds'][part]:.2f}" for part in PARTS),
                f"{row['required_s']:.2f}",
                f"{row['required_cpu_s']:.2f}",
                f"{row['peak_mb']:.0f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
