"""The result table as text and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.console import Console
from rich.table import Table

from nesa_node.evaluation.choices import Accuracy
from nesa_node.evaluation.rows import Change, Row, compare

PIPE_WIDTH = 120
"""Columns of the table if the output is not a terminal."""
_PACKAGES = ("nesa-node", "torch", "transformers")


def print_rows(rows: Sequence[Row], *, title: str, unquantized: str, out: TextIO) -> None:
    """Print the rows as a table; the first is the baseline.

    `unquantized`: label of weights that are not quantized, their data type.
    """
    console = Console(file=out, width=None if out.isatty() else PIPE_WIDTH)
    table = Table(title=title, title_justify="left")
    table.add_column("weights")
    table.add_column("wire", no_wrap=True)
    for heading in _headings(rows[0]):
        table.add_column(heading, justify="right")
    for row in rows:
        weights = unquantized if row.cell.weights == "none" else row.cell.weights
        change = None if row is rows[0] else compare(row, rows[0])
        table.add_row(weights, row.cell.wire, *_figures(row, change))
    console.print(table)


def write_rows(rows: Sequence[Row], path: Path, *, options: Mapping[str, object]) -> None:
    """Write a JSON array with one object per row and line, with options and machine.

    Raises `OSError`.
    """
    about = {
        "benchmark": "eval",
        "measured_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "machine": _machine(),
        "options": dict(options),
    }
    lines = [json.dumps(about | to_json(row, compare(row, rows[0]))) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def to_json(row: Row, change: Change) -> dict[str, Any]:
    """A row with its change, and the values per item that further paired tests need."""
    told: dict[str, Any] = {
        "weights": row.cell.weights,
        "wire": row.cell.wire,
        "seconds": round(row.seconds, 1),
    }
    if row.perplexity is not None:
        told["perplexity"] = {
            "value": row.perplexity.value,
            "standard_error": row.perplexity.standard_error,
            "tokens": row.perplexity.tokens,
            "change": change.perplexity,
            "change_standard_error": change.perplexity_error,
            "p_value": change.perplexity_p,
            "block_nll": [round(value, 6) for value in row.perplexity.block_nll],
        }
    if row.choices is not None:
        told["acc"] = _accuracy(row.choices.plain, change.plain_p)
        told["acc_norm"] = _accuracy(row.choices.normalised, change.normalised_p)
    for name, task in row.tasks.items():
        told.setdefault("tasks", {})[name] = {
            "metric": task.metric,
            "value": task.value,
            "standard_error": task.standard_error,
            "p_value": change.tasks_p[name],
            "values": task.values,
        }
    return told


def _accuracy(accuracy: Accuracy, p_value: float | None) -> dict[str, Any]:
    return {
        "value": accuracy.value,
        "standard_error": accuracy.standard_error,
        "items": len(accuracy.right),
        "p_value": p_value,
        "right": "".join("01"[answer] for answer in accuracy.right),
    }


def _headings(row: Row) -> list[str]:
    headings = []
    if row.perplexity is not None:
        headings += ["perplexity", "change", "p"]
    if row.choices is not None:
        headings += ["acc_norm", "p", "acc", "p"]
    for name, task in row.tasks.items():
        headings += [f"{name}\n{task.metric}", "p"]
    return headings


def _figures(row: Row, change: Change | None) -> list[str]:
    figures = []
    if row.perplexity is not None:
        figures.append(f"{row.perplexity.value:.2f} ± {row.perplexity.standard_error:.2f}")
        if change is None:
            figures += ["", ""]
        else:
            figures.append(_percent(change.perplexity, change.perplexity_error))
            figures.append(_p(change.perplexity_p))
    if row.choices is not None:
        tests = (None, None) if change is None else (change.normalised_p, change.plain_p)
        for accuracy, p_value in zip(
            (row.choices.normalised, row.choices.plain), tests, strict=True
        ):
            figures.append(f"{accuracy.value:.3f} ± {accuracy.standard_error:.3f}")
            figures.append(_p(p_value))
    for name, task in row.tasks.items():
        figures.append(f"{task.value:.3f} ± {task.standard_error:.3f}")
        figures.append("" if change is None else _p(change.tasks_p[name]))
    return figures


def _percent(change: float | None, error: float | None) -> str:
    return "" if change is None or error is None else f"{change:+.2%} ± {error:.2%}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    named = re.search(r"^model name\s*:\s*(.+)$", facts, flags=re.MULTILINE)
    return named[1] if named else platform.machine()


def _machine() -> dict[str, object]:
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }
