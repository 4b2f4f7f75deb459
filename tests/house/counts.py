"""Counts of a checkout's structure, side by side: `python -m tests.house.counts [CHECKOUT ...]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.house.sources import (
    circles,
    doubled_classes,
    folders_of,
    importers,
    modules_of,
    persons,
    settings_twice,
)

ROOT = Path(__file__).resolve().parents[2]
MAX_MODULES = 14
SHORT_LINES = 80


def counts(root: Path) -> Iterator[tuple[str, str]]:
    """Name and figure of each count of the package in `root`."""
    modules = modules_of(root, "nesa_node")
    lines = [module.lines for module in modules]
    by = importers(modules, modules)
    short = [m for m in modules if m.lines < SHORT_LINES and m.path.name != "__init__.py"]
    found, words = persons(modules)
    yield "files", f"{len(modules):,}"
    yield "lines", f"{sum(lines):,}"
    yield "median lines of a file", f"{median(lines):.0f}"
    crowded = [n for n in folders_of(modules).values() if n > MAX_MODULES]
    yield f"folders of more than {MAX_MODULES} modules", str(len(crowded))
    yield "modules in import circles", str(sum(map(len, circles(modules))))
    yield "class names that exist twice or more", str(len(doubled_classes(modules)))
    single = sum(len(by[module.name]) == 1 for module in short)
    yield f"modules below {SHORT_LINES} lines with one importer", str(single)
    yield "settings declared twice", str(len(settings_twice(root)))
    yield "indefinite persons per 10,000 words", f"{len(found) / words * 10_000:.1f}"


def main(argv: list[str]) -> None:
    roots = [Path(argument).resolve() for argument in argv] or [ROOT]
    columns = [dict(counts(root)) for root in roots]
    for name in columns[0]:
        print(f"{name:45}", *(f"{column[name]:>10}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
