"""The demo model through 1, 2 and 3 daemons of this machine against transformers alone.

One thread per process, float32, greedy, whole `generate` calls. The swarm and the local model take
turns within a run, so that a noisy machine disturbs both; the ratio is the median of the runs' own.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.cli.services.local_swarm import LocalNode, local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.core.ids import split_evenly
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.engine.weights.hub import open_checkpoint

QUESTION = "Describe how a lighthouse works."
NEW_TOKENS = 64
DEFAULTS = Options(model="demo")
QUICK = Options(model="demo", runs=1)
FLAGS = ("--torch-dtype", "float32", "--device", "cpu", "--threads", "1")


def run(options: Options) -> list[dict[str, Any]]:
    """One row per number of daemons and routing. Of the options only `runs` counts."""
    torch.set_num_threads(1)
    folder = demo_model_path(default_cache_dir())
    prompt = encode(folder)
    local: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    rows = [
        measure(folder, nodes, routing, prompt, local, options.runs)
        for nodes, routing in ((1, "chain"), (2, "chain"), (3, "chain"), (3, "star"))
    ]
    show(rows)
    return rows


def encode(folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    messages = [{"role": "user", "content": QUESTION}]
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def measure(
    folder: Path, nodes: int, routing: str, prompt: torch.Tensor, local: Any, runs: int
) -> dict[str, Any]:
    blocks = open_checkpoint(str(folder), cache_dir=folder).num_blocks
    with (
        tempfile.TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(folder, split_evenly(blocks, nodes), Path(temporary), flags=FLAGS) as daemons,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder,
            initial_peers=daemons[0].addresses,
            dtype=torch.float32,
            routing="star" if routing == "star" else "chain",
            reuse_prefix=False,
        ) as model,
    ):
        started = time.perf_counter()
        first = generate(model, prompt, 1)
        first_s = time.perf_counter() - started
        swarm_s, local_s, same = [], [], []
        for _ in range(runs):
            theirs, seconds = timed(local, prompt)
            local_s.append(seconds)
            ours, seconds = timed(model, prompt)
            swarm_s.append(seconds)
            same.append(torch.equal(ours, theirs))
        return {
            "nodes": nodes,
            "routing": routing,
            "new_tokens": NEW_TOKENS,
            "swarm_tokens_per_s": NEW_TOKENS / median(swarm_s),
            "local_tokens_per_s": NEW_TOKENS / median(local_s),
            "ratio": median(a / b for a, b in zip(local_s, swarm_s, strict=True)),
            "tokens_equal": all(same) and bool(first.shape[1] == prompt.shape[1] + 1),
            "runs": [
                {"swarm_s": ours_s, "local_s": alone_s, "tokens_equal": equal}
                for ours_s, alone_s, equal in zip(swarm_s, local_s, same, strict=True)
            ],
            **start_up(daemons, first_s),
        }


def start_up(daemons: list[LocalNode], first_s: float) -> dict[str, Any]:
    """`first_token_s` includes joining as a client and opening the session."""
    return {
        "ready_s": [daemon.startup_s for daemon in daemons],
        "first_token_s": first_s,
        "peak_memory_bytes": [daemon.peak_memory_bytes() for daemon in daemons],
    }


def timed(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    started = time.perf_counter()
    ids = generate(model, prompt, NEW_TOKENS)
    return ids, time.perf_counter() - started


def generate(model: Any, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    ids: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return ids


def show(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            str(row["nodes"]),
            row["routing"],
            f"{row['swarm_tokens_per_s']:.1f}",
            f"{row['local_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            "yes" if row["tokens_equal"] else "NO",
            f"{max(row['ready_s']):.1f}",
            f"{row['first_token_s']:.1f}",
            f"{max(row['peak_memory_bytes']) / 2**20:.0f}",
        )
        for row in rows
    ]
    title = "demo model, float32, one thread per process"
    headings = "nodes|routing|tokens/s|transformers|ratio|equal|ready s|first token s|peak MiB"
    print_table(title, headings, cells)
