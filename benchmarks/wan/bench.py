"""One session through three daemons that are as far apart as a cell of the table says.

The daemons start once; the links change from cell to cell. Within a run transformers alone, the
unshaped network and the cell's take turns, so that a noisy machine disturbs all. There are two
bounds. The physical one counts as compute a step of transformers alone; the other one the step on
the unshaped network, which contains the swarm's own overhead, so that it tells what distance adds
beside latency and bytes. Ratios are the medians of the runs' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.emulator.links import Link
from benchmarks.emulator.probes import round_trips_ms, throughput_mbit_per_s
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.wan.cells import Cell, Chain, grid
from benchmarks.wan.sites import CLIENT, WanSwarm, open_wan_swarm

DEFAULTS = Options(model="50m", nodes=(3,), prompt_tokens=8, new_tokens=12)
QUICK = Options(
    model="tiny",
    nodes=(3,),
    runs=1,
    prompt_tokens=8,
    new_tokens=12,
    round_trips_ms=(0, 50),
    bandwidths_mbit=(100,),
    batches=(1,),
)
WARM_UP_STEPS = 3
PINGS = 9


def run(options: Options) -> list[dict[str, Any]]:
    """One row per cell."""
    torch.set_num_threads(1)
    least = WARM_UP_STEPS + 2
    if options.new_tokens < least:
        raise ValueError(f"wan measures after {WARM_UP_STEPS} steps: --new-tokens {least} or more")
    rows: list[dict[str, Any]] = []
    with model_folder(options) as folder, open_wan_swarm(folder, options) as swarm:
        reached: dict[Link, dict[str, float]] = {}
        for cell in grid(options):
            if cell.link not in reached:
                reached[cell.link] = probe(swarm, cell.link)
            about = reached[cell.link] | {"real_time": swarm.wan.real_time}
            rows.append(measure(swarm, cell, options) | about)
    show(rows, options)
    return rows


def probe(swarm: WanSwarm, link: Link) -> dict[str, float]:
    """What the link from the client's site to the first node's does to others than the swarm."""
    swarm.wan.set_all(link)
    ends = (swarm.wan, CLIENT, swarm.nodes[0].name)
    return {
        "reached_round_trip_ms": median(round_trips_ms(*ends, count=PINGS)),
        "reached_mbit_per_s": throughput_mbit_per_s(*ends),
    }


def measure(swarm: WanSwarm, cell: Cell, options: Options) -> dict[str, Any]:
    swarm.wan.set_all(Link())
    for local in (False, True):
        swarm.generate(cell, options, local=local)  # joins the swarm, touches all memory once
    runs = []
    for _ in range(options.runs):
        alone = swarm.generate(cell, options, local=True)
        swarm.wan.set_all(Link())
        near = swarm.generate(cell, options)
        swarm.wan.set_all(cell.link)
        far = swarm.generate(cell, options)
        runs.append(compare(swarm.chain, cell, alone, near, far))
    return summarize(swarm.chain, cell, runs)


def compare(
    chain: Chain, cell: Cell, alone: dict[str, Any], near: dict[str, Any], far: dict[str, Any]
) -> dict[str, Any]:
    """One run: what the same generation took alone, and in a swarm without and with distance."""
    local_s = median(alone["gaps_s"][WARM_UP_STEPS:])
    physical_s = chain.bound_s(cell, local_s)
    near_s, far_s = near["gaps_s"][WARM_UP_STEPS:], far["gaps_s"][WARM_UP_STEPS:]
    bound_s = chain.bound_s(cell, median(near_s))
    return {
        "compute_s": median(near_s),
        "bound_s": bound_s,
        "step_s": median(far_s),
        "ratio": median(far_s) / bound_s,
        "local_s": local_s,
        "physical_bound_s": physical_s,
        "physical_ratio": median(far_s) / physical_s,
        "mean_ratio": fmean(far_s) / chain.bound_s(cell, fmean(near_s)),
        "first_token_s": far["first_token_s"],
        "near_first_token_s": near["first_token_s"],
        "wire_bytes": far["wire_bytes"],
        "tokens_equal": near["tokens"] == far["tokens"],
        "local_gaps_s": alone["gaps_s"],
        "near_gaps_s": near["gaps_s"],
        "gaps_s": far["gaps_s"],
    }


def summarize(chain: Chain, cell: Cell, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    keys = (
        *("local_s", "physical_bound_s", "physical_ratio"),
        *("compute_s", "bound_s", "step_s", "ratio", "mean_ratio", "first_token_s"),
    )
    middle = {key: median(one[key] for one in runs) for key in keys}
    return {
        **asdict(cell),
        "nodes": chain.nodes,
        "leg_bytes": chain.leg_bytes(cell),
        **middle,
        "tokens_per_s": cell.batch / middle["step_s"],
        "bound_tokens_per_s": cell.batch / middle["bound_s"],
        "tokens_equal": all(one["tokens_equal"] for one in runs),
        "runs": list(runs),
    }


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    headings = (
        "round trip\nms|reached\nms|Mbit/s|reached\nMbit/s|batch|codec|tokens/s|bound\ntokens/s|"
        "step\nms|bound\nms|of which\ncompute ms|"
        "local\ncompute ms|step /\nphysical|step /\nbound|mean /\nbound|first token\nms|equal"
    )
    cells = [
        (
            str(row["round_trip_ms"]),
            f"{row['reached_round_trip_ms']:.1f}",
            str(row["bandwidth_mbit_per_s"]),
            f"{row['reached_mbit_per_s']:.0f}",
            str(row["batch"]),
            row["codec"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['bound_tokens_per_s']:.1f}",
            *(f"{row[key] * 1000:.1f}" for key in ("step_s", "bound_s", "compute_s", "local_s")),
            f"{row['physical_ratio']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['mean_ratio']:.2f}",
            f"{row['first_token_s'] * 1000:.0f}",
            "yes" if row["tokens_equal"] else "NO",
        )
        for row in rows
    ]
    title = f"wan: {options.model}, {options.dtype}, {options.nodes[0]} daemons and a client apart"
    print_table(title, headings, cells)
