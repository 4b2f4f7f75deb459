"""Speed and memory of two checkouts in turns: `python -m tests.house.speed OLD NEW [TURNS]`.

Each turn runs `benchmarks` decode and concurrency of both checkouts, one after the other, first
the old one, then the new one, in the next turn the other way around. A line gives the median of
each and the median of the turns' own ratios, new over old, so that above 1 is faster, and for
bytes more.

A step of `hop` takes about a millisecond, and a shared machine is for minutes half as fast as for
others. So the swarms of both checkouts run at once, and take turns of 20 steps.

A machine with nothing else to do is assumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

DTYPES = ("bfloat16", "float32")
COMMON = ("--model", "50m", "--nodes", "3", "--threads", "1")
COMMANDS = {
    **{f"decode {dtype}": ("decode", "--dtype", dtype, "--runs", "3", *COMMON) for dtype in DTYPES},
    **{
        f"concurrency {dtype}": (
            *("concurrency", "--dtype", dtype, "--sessions", "1,4,16"),
            *("--long-prompt", "0", "--runs", "2", *COMMON),
        )
        for dtype in DTYPES
    },
}
HOP_NODES = (1, 3)
HOP_TURNS = 60  # in each turn of the benchmarks


def checkout_environment(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(root)}


def run_benchmark(root: Path, command: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of a benchmark in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        argv = [sys.executable, "-m", "benchmarks", *command, "--json", str(path)]
        environment = checkout_environment(root)
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
        else:
            yield f"{name}: tokens/s of {row['sessions']}", row["tokens_per_s"]


@contextmanager
def open_steps(root: Path, nodes: int) -> Iterator[tuple[IO[str], IO[str]]]:
    """stdin and stdout of tests/house/hop_turns.py, whose swarm is a checkout's."""
    argv = [sys.executable, str(Path(__file__).with_name("hop_turns.py")), str(nodes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=root, env=checkout_environment(root), stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                raise RuntimeError(f"hop_turns of {root} ended with {process.wait()}")
        yield process.stdin, process.stdout
        process.stdin.close()


def hop_turns(roots: tuple[Path, Path], nodes: int) -> Iterator[tuple[float, float]]:
    """Steps per second of both checkouts, one pair a turn."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(open_steps(root, nodes)) for root in roots]
        for turn in range(HOP_TURNS):
            speeds = [0.0, 0.0]
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                requests, answers = pipes[index]
                requests.write("\n")
                requests.flush()
                speeds[index] = 1 / float(answers.readline())
            yield speeds[0], speeds[1]


def main(argv: list[str]) -> None:
    roots = Path(argv[0]).resolve(), Path(argv[1]).resolve()
    turns = int(argv[2]) if len(argv) > 2 else 5
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(turns):
        for name, command in COMMANDS.items():
            rows: dict[Path, dict[str, float]] = {}
            for root in roots if turn % 2 == 0 else reversed(roots):
                rows[root] = dict(figures(name, run_benchmark(root, command)))
            for figure, before in rows[roots[0]].items():
                after = rows[roots[1]][figure]
                found[figure].append((before, after))
                print(f"{figure}: {before:.6g} {after:.6g}", file=sys.stderr, flush=True)
        for nodes in HOP_NODES:
            found[f"hop: steps/s through {nodes}"] += hop_turns(roots, nodes)
    print(f"{'':38} {'old':>12} {'new':>12} {'ratio':>7}")
    for figure, pairs in found.items():
        before, after = (median(values) for values in zip(*pairs, strict=True))
        ratio = median(value / other for other, value in pairs)
        print(f"{figure:38} {before:12.6g} {after:12.6g} {ratio:7.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
