"""Whether nodes choose as well as somebody who has tried every codec.

A prompt is read and two tokens are generated, over links of several bandwidths, with each codec by
name and with the quality "balanced", under which every link chooses for itself. All codecs take
turns within a run, so that a noisy machine disturbs all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.emulator.links import Link
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.wan.bench import probe
from benchmarks.wan.cells import Cell
from benchmarks.wan.sites import WanSwarm, open_wan_swarm

AUTO = "balanced"
FIXED = ("none", "bfloat16", "int8", "int4", "lossless")
PROMPTS = (32, 256, 1024)
DEFAULTS = Options(
    model="50m",
    nodes=(3,),
    new_tokens=3,
    round_trips_ms=(20,),
    bandwidths_mbit=(1000, 100, 20, 5),
    batches=(1,),
    prompts=PROMPTS,
    codecs=(*FIXED, AUTO),
)
QUICK = DEFAULTS.updated({"runs": 1, "model": "tiny", "bandwidths_mbit": (20,), "prompts": (32,)})
NEAR = 0.05


def run(options: Options) -> list[dict[str, Any]]:
    """One row for each bandwidth and length of prompt."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with model_folder(options) as folder, open_wan_swarm(folder, options) as swarm:
        for bandwidth in options.bandwidths_mbit:
            link = Cell(options.round_trips_ms[0], bandwidth, 1, "none").link
            reached = probe(swarm, link)
            rows += [
                measure(swarm, link, bandwidth, tokens, options) | reached
                for tokens in options.prompts
            ]
    show(rows, options)
    return rows


def measure(
    swarm: WanSwarm, link: Link, bandwidth: int, tokens: int, options: Options
) -> dict[str, Any]:
    asked = options.updated({"prompt_tokens": tokens})
    cells = {
        codec: Cell(options.round_trips_ms[0], bandwidth, 1, codec) for codec in options.codecs
    }
    swarm.wan.set_all(link)
    for cell in cells.values():
        swarm.generate(cell, asked)  # joins the swarm, and gets to know the links
    runs = []
    for _ in range(options.runs):
        found = {codec: swarm.generate(cell, asked) for codec, cell in cells.items()}
        runs.append({codec: one["seconds"] for codec, one in found.items()})
    return {
        "round_trip_ms": options.round_trips_ms[0],
        "bandwidth_mbit_per_s": bandwidth,
        "prompt_tokens": tokens,
        **compare(runs),
    }


def compare(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians of each codec's seconds, and whether the one that chose came near the best.

    Near: within 5 %, or within twice the median deviation of a run from its codec's median.
    """
    medians = {codec: median(run[codec] for run in runs) for codec in runs[0]}
    fixed = {codec: seconds for codec, seconds in medians.items() if codec != AUTO}
    best = min(fixed, key=fixed.__getitem__)
    deviation_s = median(abs(run[codec] - medians[codec]) for run in runs for codec in run)
    allowed_s = max(NEAR * fixed[best], 2 * deviation_s)
    return {
        "seconds": medians,
        "best": best,
        "ratio": medians[AUTO] / fixed[best],
        "deviation_s": deviation_s,
        "near": medians[AUTO] - fixed[best] <= allowed_s,
        "runs": list(runs),
    }


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    seconds = "|".join(f"{codec}\ns" for codec in options.codecs)
    headings = f"Mbit/s|reached|prompt|{seconds}|best|{AUTO} /\nbest|deviation\ns|near"
    cells = [
        (
            str(row["bandwidth_mbit_per_s"]),
            f"{row['reached_mbit_per_s']:.0f}",
            str(row["prompt_tokens"]),
            *(f"{row['seconds'][codec]:.2f}" for codec in options.codecs),
            row["best"],
            f"{row['ratio']:.2f}",
            f"{row['deviation_s']:.2f}",
            "yes" if row["near"] else "NO",
        )
        for row in rows
    ]
    title = f"auto: {options.model}, {options.dtype}, {options.round_trips_ms[0]} ms round trip"
    print_table(title, headings, cells)
