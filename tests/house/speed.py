"""Speed and memory of two checkouts in turns: `python -m tests.house.speed OLD NEW [TURNS]`.

Each turn runs `benchmarks` decode, hop and concurrency of both checkouts, one after the other. A
line gives the median of each and the median of the turns' own ratios, new over old, so that above 1
is faster, and for bytes more. A machine with nothing else to do is assumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

DTYPES = ("bfloat16", "float32")
COMMON = ("--model", "50m", "--nodes", "3", "--threads", "1")
COMMANDS = {
    **{f"decode {dtype}": ("decode", "--dtype", dtype, "--runs", "3", *COMMON) for dtype in DTYPES},
    "hop": ("hop", "--runs", "3", "--nodes", "1,3"),
    **{
        f"concurrency {dtype}": (
            *("concurrency", "--dtype", dtype, "--sessions", "1,4,16"),
            *("--long-prompt", "0", "--runs", "2", *COMMON),
        )
        for dtype in DTYPES
    },
}


def run_benchmark(root: Path, command: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of a benchmark in a checkout."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        argv = [sys.executable, "-m", "benchmarks", *command, "--json", str(path)]
        subprocess.run(
            argv, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=900
        )
        rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
        return rows


def figures(name: str, rows: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Speeds per second, and bytes, by name."""
    for row in rows:
        if name.startswith("decode"):
            yield f"{name}: tokens/s", row["swarm_tokens_per_s"]
            for memory in ("uss_bytes", "peak_rss_bytes"):
                yield f"{name}: {memory}", max(node[memory] for node in row["memory"])
        elif name == "hop":
            steps = [run["step_p50_s"] for run in row["runs"]]
            yield f"{name}: steps/s through {row['nodes']}", 1 / median(steps)
        else:
            yield f"{name}: tokens/s of {row['sessions']}", row["tokens_per_s"]


def main(argv: list[str]) -> None:
    old, new = (Path(argument).resolve() for argument in argv[:2])
    turns = int(argv[2]) if len(argv) > 2 else 5
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(turns):
        for name, command in COMMANDS.items():
            before, after = (
                dict(figures(name, run_benchmark(root, command))) for root in (old, new)
            )
            for figure, value in before.items():
                found[figure].append((value, after[figure]))
                print(f"{figure}: {value:.6g} {after[figure]:.6g}", file=sys.stderr, flush=True)
    print(f"{'':38} {'old':>12} {'new':>12} {'ratio':>7}")
    for figure, pairs in found.items():
        before, after = (median(values) for values in zip(*pairs, strict=True))
        ratio = median(value / other for other, value in pairs)
        print(f"{figure:38} {before:12.6g} {after:12.6g} {ratio:7.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
