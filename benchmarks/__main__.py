"""`python -m benchmarks NAME`: run one benchmark, print its table, write its JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import swarm
from benchmarks.results import write_result

BENCHMARKS = {"swarm": swarm.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", type=Path, help="where to write [default: benchmarks/results]")
    parser.add_argument("--runs", type=int, default=5, help="how often each figure is measured")
    arguments = parser.parse_args()
    rows = BENCHMARKS[arguments.name](arguments.runs)
    print(f"\nwritten to {write_result(arguments.name, rows, arguments.json)}")


if __name__ == "__main__":
    main()
