"""What is written beside every figure, so that figures of two machines are not confused."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent / "results"
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
_FILE_WIDTH = 160
_PACKAGES = ("nesa-node", "torch", "transformers", "hivemind")


def machine() -> dict[str, Any]:
    """The processor, its flags that matter, memory, and the versions of what ran."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="ascii").splitlines() if info.exists() else []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "processor": facts.get("model name", platform.processor()),
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def load_average() -> list[float]:
    """Processes that ran or waited for a processor: means of 1, 5 and 15 minutes."""
    return [round(mean, 2) for mean in os.getloadavg()]


def source() -> dict[str, Any]:
    """The git commit that is measured, and whether files differ from it; None outside of git."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", *arguments], cwd=FOLDER.parent, check=True, capture_output=True, text=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "uncommitted_changes": None}
    return {"commit": commit, "uncommitted_changes": bool(changed)}


def write_result(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    path: Path | None,
    *,
    options: Mapping[str, Any],
    load_before: Sequence[float],
) -> Path:
    """Write one JSON object per row, each with all that is to be known of it; return where.

    The file is an array with one object per line. `load_before` is `load_average` at the start.
    """
    now = datetime.now(UTC)
    target = result_path(name, path, now)
    about = {
        "benchmark": name,
        "measured_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "source": source(),
        "machine": machine(),
        "load_average": {"before": list(load_before), "after": load_average()},
        "options": dict(options),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        assert about.keys().isdisjoint(row), about.keys() & row
    lines = [json.dumps({**about, **row}) for row in rows]
    target.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return target


def result_path(name: str, path: Path | None, now: datetime) -> Path:
    return path or FOLDER / f"{name}-{now:%Y-%m-%d}.json"


def print_table(title: str, headings: str, cells: Sequence[Sequence[str]]) -> None:
    """`headings` are separated by "|"; a line break in one saves width."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    table = Table(title=title, title_justify="left")
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def format_cell(row: dict[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    """A figure of a row, multiplied by `scale`; nothing where the row has none."""
    return form.format(row[name] * scale) if name in row else ""
