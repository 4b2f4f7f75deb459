"""Tokens/s that a pool's plan predicts, before and after its nodes have measured their spans,
against those that a client gets. Each run afterwards is compared with what was predicted just
before it, since a shared computer changes its speed within minutes.

Machines with threads and memory as 1:2:4, and one that says it has a GPU; once it tells the truth,
once it overstates its figures ten times. The client computes on this machine too. No machine's
blocks may fit into the processor's caches, or it measures them faster than it runs them in turn
with the others.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.artificial_gpu import OVERSTATED
from benchmarks.generation import generate
from benchmarks.models import model_folder, random_prompt
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node import AutoDistributedModelForCausalLM
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.engine.kernels.threads import QUIET_SHARE
from nesa_node.engine.model.machine_figures import QUIET_RUNS
from nesa_node.server.pool.member import total_memory_bytes
from nesa_node.server.pool.models import describe_model, open_pool_model
from tests.pool.machines import Pool, open_pool

DEFAULTS = Options(runs=5)
QUICK = Options(model="tiny", runs=1, new_tokens=8, seconds=1.0)
MODEL = "measured"
PARTS = (1, 2, 4, 2)
"""Of the memory, the last for the machine with the GPU; threads are the same, but 2 at most."""
SPARE = 1.02
"""Memory of each machine, as a multiple of what its blocks take."""
OVERSTATEMENTS = (1, 10)
SETTLE_S = 45.0
"""Time after which nodes have announced the speed of the steps that they served."""
FIGURES_S = 420.0


def run(options: Options) -> list[dict[str, Any]]:
    with model_folder(options) as folder:
        rows = [measure(folder, options, factor) for factor in OVERSTATEMENTS]
    show(rows)
    return rows


def measure(folder: Path, options: Options, overstated: int) -> dict[str, Any]:
    with TemporaryDirectory(prefix="nesa-bench-pool-") as work:
        cache_dir = Path(work) / "cache"
        cache_dir.mkdir()
        (cache_dir / MODEL).symlink_to(folder)
        unit = SPARE * unit_bytes(cache_dir) / total_memory_bytes(torch.device("cpu"))
        os.environ[OVERSTATED] = f"{overstated}"
        with open_pool(Path(work), []) as pool:
            for number, part in enumerate(PARTS, 1):
                is_gpu = number == len(PARTS)
                pool.start_machine(
                    f"machine-{number}",
                    *("--pool-memory-share", f"{min(1.0, part * unit):.9f}"),
                    threads=min(part, os.cpu_count() or 1),
                    module="benchmarks.artificial_gpu" if is_gpu else "nesa_node",
                )
            pool.wait(lambda: len(pool.view()["machines"]) == len(PARTS), 240, "offers")
            others_share = wait_for_quiet_figures(
                pool, overstated, min(FIGURES_S, 2.5 * options.seconds)
            )
            return {
                "overstated": overstated,
                "others_share": others_share,
                "figures": read_figures(pool),
                **measure_pool(pool, cache_dir, options),
            }


def unit_bytes(cache_dir: Path) -> int:
    """Bytes of the smallest part with which all machines together hold the model."""
    shape, _ = describe_model(open_pool_model(MODEL, OrchestratorConfig(cache_dir=cache_dir)))
    block = max(shape.block_bytes["none"]) + shape.cache_bytes
    return block * math.ceil(shape.num_blocks / sum(PARTS))


def wait_for_quiet_figures(pool: Pool, overstated: int, seconds: float) -> float:
    """Wait until all machines offer figures of an idle computer, or too long. Returns the share of
    its cores that other processes used, NaN for too long.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = list(read_figures(pool).values())
        others_share = max((each["others_share"] for each in found), default=1.0)
        # To ask for the offers takes seconds of the computer that is to be idle.
        if others_share <= QUIET_SHARE and all(each["runs"] >= QUIET_RUNS for each in found):
            known = [rate_of(each["kinds"]) for each in found]
            offered = [
                rate_of(each["figures"]) / (overstated if each["device_type"] == "cuda" else 1)
                for each in pool.view()["machines"]
            ]
            if all(any(math.isclose(rate, each) for each in known) for rate in offered):
                return float(others_share)
        time.sleep(10.0)
    return math.nan


def read_figures(pool: Pool) -> dict[str, Any]:
    """What was measured for each number of threads, by the name of its file."""
    return {
        path.stem: json.loads(path.read_text()) for path in pool.cache_dir.glob("figures-*.json")
    }


def rate_of(kinds: dict[str, Any]) -> float:
    """Bytes/s at which float32 weights are read."""
    return float(kinds["float32"]["read_bytes_per_s"])


def measure_pool(pool: Pool, cache_dir: Path, options: Options) -> dict[str, Any]:
    created = pool.swarm("create", MODEL)
    assert created.returncode == 0, created.stderr
    predicted = float(re.findall(r"([0-9.]+) tokens/s predicted", created.stdout)[0])
    with AutoDistributedModelForCausalLM.from_pretrained(
        cache_dir / MODEL, initial_peers=pool.addresses
    ) as model:
        prompt = random_prompt(model, options.prompt_tokens, options.seed)
        generate(model, prompt, 2)
        before = [tokens_per_s(model, prompt, options) for _ in range(options.runs)]
        runs = []
        for _ in range(options.runs):
            time.sleep(min(SETTLE_S, options.seconds))
            [swarm] = pool.view()["swarms"]
            measured = tokens_per_s(model, prompt, options)
            runs.append({"predicted": swarm["predicted_tokens_per_s"], "measured": measured})
    return {
        "spans": spans_of(pool),
        "predicted_before": predicted,
        "measured_before": median(before),
        "ratio_before": predicted / median(before),
        "predicted_after": median(run["predicted"] for run in runs),
        "measured_after": median(run["measured"] for run in runs),
        "ratio_after": median(run["predicted"] / run["measured"] for run in runs),
        "runs": [{"before": before, "after": runs}],
    }


def tokens_per_s(model: Any, prompt: torch.Tensor, options: Options) -> float:
    """Tokens/s between the first and the last token of a run."""
    found = generate(model, prompt, options.new_tokens)
    return len(found.gaps_s) / sum(found.gaps_s)


def spans_of(pool: Pool) -> dict[str, Any]:
    return {
        machine["public_name"]: each["span"]
        for machine in pool.view()["machines"]
        for each in machine["held"]
    }


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "A pool's predicted tokens/s",
        "GPU's figures|machines|others'\nshare|predicted\nbefore|measured|ratio|predicted\nafter|"
        "measured|ratio",
        [
            [
                f"times {row['overstated']}",
                str(len(row["spans"])),
                f"{row['others_share']:.2f}",
                *(f"{row[key]:.1f}" for key in ("predicted_before", "measured_before")),
                f"{row['ratio_before']:.2f}",
                *(f"{row[key]:.1f}" for key in ("predicted_after", "measured_after")),
                f"{row['ratio_after']:.2f}",
            ]
            for row in rows
        ],
    )
