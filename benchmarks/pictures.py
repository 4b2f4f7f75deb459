"""Pictures of texts by four nodes beside diffusers alone: speed, equality, and quality by a scorer.

The shape of the Nesa paper's table 3, without its models, which lie on the hub: pipelines of three
classes with random weights, larger than those of tests and smaller than published ones. A scorer,
such as CLIP, comes from a folder (`--scorer`), and judges the pictures of both. Turns alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.options import Options
from benchmarks.picture_scores import PROMPTS, open_scorer
from benchmarks.results import print_table
from benchmarks.swarms import READY_TIMEOUT_S, torch_threads
from nesa_node import SwarmPipeline
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.core.ids import split_evenly
from tests.engine.tiny_pipelines import TITLES, save_pipeline

DEFAULTS = Options(model="250m", nodes=(4,), runs=5, new_tokens=8)
"""`new_tokens` are denoising steps. `--model tiny` is one pipeline, of few channels."""
QUICK = Options(model="tiny", nodes=(4,), runs=1, new_tokens=2)
PIECES = 8
WIDTH = 8
TIMED = ("quality",)
"""Prompts of the runs that are timed; pictures of all are compared and scored."""


def run(options: Options) -> list[dict[str, Any]]:
    is_tiny = options.model == "tiny"
    with torch_threads(0):
        rows = [
            measure(title, 1 if is_tiny else WIDTH, options)
            for title in (TITLES[:1] if is_tiny else TITLES)
        ]
    show(rows)
    return rows


def measure(title: str, width: int, options: Options) -> dict[str, Any]:
    scorer = None if options.scorer is None else open_scorer(Path(options.scorer))
    with TemporaryDirectory(prefix="nesa-bench-") as temporary:
        folder = Path(temporary)
        alone = save_pipeline(title, folder / "model", width=width)
        flags = ["--pieces", str(PIECES), "--log-level", "warning"]
        spans = split_evenly(PIECES, options.nodes[0])
        with (
            local_swarm(
                folder / "model", spans, folder, flags=flags, ready_timeout_s=READY_TIMEOUT_S
            ) as nodes,
            SwarmPipeline(
                "text-to-image", folder / "model", initial_peers=[nodes[0].addresses[0]]
            ) as swarm,
        ):
            both = {"alone": alone, "swarm": swarm}
            runs = [
                {name: paint(each, TIMED, options)[0] for name, each in both.items()}
                for _ in range(options.runs + 1)
            ][1:]  # the first one allocates
            expected, ours = (paint(each, tuple(PROMPTS), options)[1] for each in both.values())
    differences = [
        np.abs(np.asarray(one, float) - np.asarray(other, float))
        for one, other in zip(flatten(ours), flatten(expected), strict=True)
    ]
    row: dict[str, Any] = {
        "pipeline": title,
        "parameters": sum(
            each.numel()
            for part in alone.components.values()
            if isinstance(part, torch.nn.Module)
            for each in part.parameters()
        ),
        "s_per_picture_alone": median(each["alone"] for each in runs),
        "s_per_picture_swarm": median(each["swarm"] for each in runs),
        "speed_of_alone": median(each["alone"] / each["swarm"] for each in runs),
        "largest_difference": max(float(each.max()) for each in differences),
        "runs": runs,
    }
    if scorer is not None:
        row |= {"scores_alone": scorer.score(expected), "scores_swarm": scorer.score(ours)}
    return row


def paint(
    make: Callable[..., Any], categories: Sequence[str], options: Options
) -> tuple[float, dict[str, list[Any]]]:
    """Seconds per picture, and pictures by category."""
    found: dict[str, list[Any]] = {category: [] for category in categories}
    times = [time.perf_counter()]
    for category in categories:
        for number, prompt in enumerate(PROMPTS[category]):
            generator = torch.Generator().manual_seed(options.seed + number)
            made = make(prompt, num_inference_steps=options.new_tokens, generator=generator).images
            found[category] += made
            times.append(time.perf_counter())
    return median(after - before for before, after in pairwise(times)), found


def flatten(pictures: dict[str, list[Any]]) -> Sequence[Any]:
    return [each for category in pictures.values() for each in category]


def show(rows: Sequence[dict[str, Any]]) -> None:
    headings = "pipeline|parameters|alone, s|swarm, s|speed of alone|difference|" + "|".join(
        PROMPTS
    )
    cells = []
    for row in rows:
        alone, swarm = row.get("scores_alone", {}), row.get("scores_swarm", {})
        scores = [f"{alone[each]:.2f} / {swarm[each]:.2f}" if alone else "-" for each in PROMPTS]
        cells.append(
            [
                row["pipeline"],
                f"{row['parameters'] / 1e6:.0f}m",
                f"{row['s_per_picture_alone']:.2f}",
                f"{row['s_per_picture_swarm']:.2f}",
                f"{row['speed_of_alone']:.3f}",
                f"{row['largest_difference']:.0f} / 255",
                *scores,
            ]
        )
    print_table("pictures; scores of those alone / by the swarm", headings, cells)
