"""Run as a program: print the files of one part of the slow tests, for continuous integration.

    python -m tests.slow_parts PARTS NUMBER

`slow_seconds.json` says how long each file's slow tests take; `python -m tests.slow_parts REPORT`
takes that from a JUnit report of `make test-all`.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = Path(__file__).with_name("slow_seconds.json")
UNKNOWN_S = 60.0
_MARKS = ("mark.slow", "first_is_fast(", "in_pieces(")


def slow_files(folder: Path = ROOT / "tests") -> list[str]:
    """The test files with a slow test, relative to the project."""
    found = (
        path
        for path in folder.rglob("test_*.py")
        if any(mark in path.read_text("utf-8") for mark in _MARKS)
    )
    return sorted(str(path.relative_to(ROOT)) for path in found)


def split(files: Iterable[str], seconds: Mapping[str, float], parts: int) -> list[list[str]]:
    """Give each file to the part that takes the least time so far, the longest files first."""
    known = {file: seconds.get(file, UNKNOWN_S) for file in files}
    total_s = [0.0] * parts
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for file in sorted(known, key=lambda file: (-known[file], file)):
        least = total_s.index(min(total_s))
        chosen[least].append(file)
        total_s[least] += known[file]
    return [sorted(part) for part in chosen]


def recorded() -> dict[str, float]:
    """Seconds of each file's slow tests."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text("utf-8"))
    return seconds


def measured(report: Path) -> dict[str, float]:
    """Seconds of each file's tests in a JUnit report, set-up included."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[file] += float(case.get("time", "0"))
    return dict(seconds)


def main(arguments: list[str]) -> None:
    files = slow_files()
    if len(arguments) == 1:
        took = measured(Path(arguments[0]))
        known = recorded() | {file: round(took[file]) for file in files if took.get(file)}
        SECONDS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n", "utf-8")
        return
    parts, number = (int(argument) for argument in arguments)
    print("\n".join(split(files, recorded(), parts)[number % parts]))


if __name__ == "__main__":
    main(sys.argv[1:])
