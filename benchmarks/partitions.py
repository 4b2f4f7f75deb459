"""How near plans of networks come to the best there can be, and how long planning takes.

Networks at their published dimensions are cut for 4, 8 and 16 equal machines of 1 TFLOP/s behind
links of several rates: by equal work in the network's own order (the naive way), by the best cuts
of Kahn's order, and by searches with both crossovers. Figures are the slowest piece's time as a
multiple of the bound (`lower_bound_s`), and of the time of one machine alone. `runs` has one search
for each seed; one that reaches the bound ends.

Then made-up graphs of 100 to 30,000 operations: the time to cut one order for 64 machines, what a
search of a minute finds, and memory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean, geometric_mean, median
from typing import Any, get_args

import numpy as np

from benchmarks.footprint import peak_bytes
from benchmarks.options import Options
from benchmarks.published_models import MODELS, capture_published
from benchmarks.results import print_table
from nesa_node.sharding.lower_bound import PRECISION, lower_bound_s
from nesa_node.sharding.operation_graph import (
    Machine,
    Operation,
    OperationGraph,
    Value,
    block_cost,
)
from nesa_node.sharding.operation_orders import OrderMaker
from nesa_node.sharding.order_search import Crossover, search_orders
from nesa_node.sharding.slicing import slice_order

DEFAULTS = Options(
    nodes=(4, 8, 16),
    bandwidths_mbit=(1000, 10_000, 100_000),
    seconds=2.0,
    batches=(100, 300, 1000, 3000, 10_000, 30_000),
)
QUICK = Options(nodes=(3,), bandwidths_mbit=(10_000,), seconds=0.5, runs=1, batches=(100,))
QUICK_MODELS = ("ResNet-101", "ViT-L/16")
GROWTH_MACHINES = 64
SEARCH_FACTOR = 30
"""Times `seconds` that the search of a large made-up graph takes: a minute by default."""
SEARCHED = 10_000


def run(options: Options) -> list[dict[str, Any]]:
    names = QUICK_MODELS if options.runs < DEFAULTS.runs else tuple(MODELS)
    rows = []
    for name in names:
        began = time.monotonic()
        graph = capture_published(name)
        capture_s = time.monotonic() - began
        for count, mbit in product(options.nodes, options.bandwidths_mbit):
            row = _plan(graph, count, mbit, options)
            rows.append({"model": name, "capture_s": capture_s, **row})
            print(name, count, mbit, round(row["biased_of_bound"], 3), flush=True)
    rows += [_grow_alone(count, options) for count in options.batches]
    show(rows)
    return rows


def _plan(graph: OperationGraph, count: int, mbit: int, options: Options) -> dict[str, Any]:
    machine = Machine(flop_per_s=1e12, moved_bytes_per_s=1e11, link_bytes_per_s=1e6 * mbit / 8)
    machines = [machine] * count
    own = slice_order(graph, np.arange(len(graph)), machines).bottleneck_s
    began = time.monotonic()
    bound = lower_bound_s(graph, machines, own)
    bound_took_s = time.monotonic() - began
    runs = []
    for seed in range(options.runs):
        each: dict[str, Any] = {"seed": seed}
        for crossover in get_args(Crossover):
            found = search_orders(
                graph,
                machines,
                seed=seed,
                budget_s=options.seconds,
                crossover=crossover,
                enough_s=bound * (1 + 2 * PRECISION),
            )
            each[f"{crossover}_s"] = found.slicing.bottleneck_s
            each[f"{crossover}_generations"] = found.generations
            each["kahn_s"] = found.kahn_s
        runs.append(each)
    best = min(own, *(each[f"{kind}_s"] for each in runs for kind in ("biased", "arithmetic")))
    return {
        "operations": len(graph),
        "gflop": graph.total_flop / 1e9,
        "machines": count,
        "mbit": mbit,
        "bound_s": bound,
        "bound_took_s": bound_took_s,
        "equal_work_of_bound": _cut_equally(graph, machines) / bound,
        "own_order_of_bound": own / bound,
        "kahn_of_bound": runs[0]["kahn_s"] / bound,
        "biased_of_bound": median(each["biased_s"] for each in runs) / bound,
        "arithmetic_of_bound": median(each["arithmetic_s"] for each in runs) / bound,
        "speedup": block_cost(graph, range(len(graph)), machine).total_s / best,
        "runs": runs,
    }


def _cut_equally(graph: OperationGraph, machines: Sequence[Machine]) -> float:
    """The slowest piece where each but the last has its share of the work, or just more."""
    work = machines[0].work_s(graph).cumsum()
    shares = work[-1] * np.arange(1, len(machines)) / len(machines)
    ends = [0, *(np.searchsorted(work, shares) + 1), len(graph)]
    return max(
        block_cost(graph, range(start, end), machine).total_s
        for start, end, machine in zip(ends, ends[1:], machines, strict=False)
    )


def _grow_alone(count: int, options: Options) -> dict[str, Any]:
    """`_grow` in a process of its own, so that its peak of memory is its own."""
    numbers = [str(each) for each in (count, options.runs, options.seed, options.seconds)]
    argv = [sys.executable, "-m", "benchmarks.partitions", *numbers]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _grow(count: int, options: Options) -> dict[str, Any]:
    before_mb = peak_bytes() / 1e6
    graph = _made_up(count, random.Random(options.seed))
    machines = [Machine(1e12, 1e11, 1.25e9)] * GROWTH_MACHINES
    order = OrderMaker(graph).breadth_first()
    runs = []
    for _ in range(options.runs):
        began = time.monotonic()
        sliced = slice_order(graph, order, machines)
        runs.append({"slice_s": time.monotonic() - began})
    row: dict[str, Any] = {
        "operations": count,
        "machines": GROWTH_MACHINES,
        "slice_s": median(each["slice_s"] for each in runs),
        "kahn_s": sliced.bottleneck_s,
        "runs": runs,
    }
    if count == SEARCHED:
        budget_s = SEARCH_FACTOR * options.seconds
        found = search_orders(graph, machines, seed=options.seed, budget_s=budget_s)
        row |= {"search_s": budget_s, "found_s": found.slicing.bottleneck_s}
        row["generations"] = found.generations
    peak_mb = peak_bytes() / 1e6
    row |= {"peak_mb": peak_mb, "above_imports_mb": peak_mb - before_mb}
    return row


def _made_up(count: int, rng: random.Random) -> OperationGraph:
    """A network with branches that meet again soon, and values that skip."""
    values = [Value(600_000, None, (0,))]
    for producer in range(count):
        near = {min(count - 1, producer + 1 + int(rng.expovariate(0.5))) for _ in range(2)}
        if rng.random() < 0.02:
            near.add(min(count - 1, producer + rng.randint(10, 200)))
        consumers = tuple(sorted(near - {producer}))
        size = rng.choice([200_000, 600_000, 2_400_000])
        values.append(Value(size, producer, consumers, producer == count - 1))
    operations = tuple(
        Operation(f"op_{index}", "made_up", 1e9 * rng.random() ** 3, 1e6, (index,))
        for index in range(count)
    )
    return OperationGraph(operations, tuple(values), (1e6,) * count)


def show(rows: Sequence[dict[str, Any]]) -> None:
    planned = [row for row in rows if "model" in row]
    print_table(
        "Slowest piece, as a multiple of the bound",
        "model|operations|machines|link,\nMbit/s|equal\nwork|Kahn|average of\nparents|biased|"
        "speedup",
        [list(_cells(row)) for row in planned],
    )
    kinds = ("equal_work", "kahn", "arithmetic", "biased")
    table = []
    for count, mbit in sorted({(row["machines"], row["mbit"]) for row in planned}):
        here = [row for row in planned if (row["machines"], row["mbit"]) == (count, mbit)]
        means = [geometric_mean(row[f"{kind}_of_bound"] for row in here) for kind in kinds]
        speedup = fmean(row["speedup"] for row in here)
        figures = [f"{each:.3f}" for each in means]
        table.append([str(count), str(mbit), *figures, f"{speedup:.2f}"])
    print_table(
        "Geometric means",
        "machines|link,\nMbit/s|equal\nwork|Kahn|average of\nparents|biased|mean\nspeedup",
        table,
    )
    print_table(
        f"Made-up graphs, {GROWTH_MACHINES} machines",
        "operations|one order, s|Kahn's order,\nms|after search,\nms|peak MB|above\nimports",
        [
            [
                str(row["operations"]),
                f"{row['slice_s']:.2f}",
                f"{1000 * row['kahn_s']:.3f}",
                f"{1000 * row['found_s']:.3f}" if "found_s" in row else "-",
                f"{row['peak_mb']:.0f}",
                f"{row['above_imports_mb']:.0f}",
            ]
            for row in rows
            if "model" not in row
        ],
    )


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (row["model"], str(row["operations"]), str(row["machines"]), str(row["mbit"]))
    for kind in ("equal_work", "kahn", "arithmetic", "biased"):
        yield f"{row[f'{kind}_of_bound']:.3f}"
    yield f"{row['speedup']:.2f}"


if __name__ == "__main__":
    given = [float(each) for each in sys.argv[1:]]
    made = Options(runs=int(given[1]), seed=int(given[2]), seconds=given[3])
    print(json.dumps(_grow(int(given[0]), made)))
