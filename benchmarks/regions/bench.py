"""Twelve daemons in three regions: their chains, their chatter, what moves them and what must not.

`world.py` says who is where, `phases.py` and `cut.py` what is done to them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.emulator.wan import EmulatorError
from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.regions import phases, traffic
from benchmarks.regions.cut import cut
from benchmarks.regions.swarm import SWIFT, Pace, Regions, open_regions
from benchmarks.regions.world import CLIENTS, MORE_JITTER, shake
from benchmarks.results import print_table
from nesa_node.core.errors import ConfigError, NesaError

DEFAULTS = Options(model="50m", nodes=(4,), runs=1, new_tokens=100, seconds=600)
QUICK = Options(model="tiny", nodes=(3,), runs=1, new_tokens=64, seconds=30)
SWIFT_BELOW_S = 120.0
"""Who measures for less than that waits less for everything else, too."""


def run(options: Options) -> list[dict[str, Any]]:
    """One row for each phase."""
    torch.set_num_threads(1)
    if options.dtype != "float32":
        raise ConfigError("regions compares tokens, which are equal in float32 only")
    pace = SWIFT if options.seconds < SWIFT_BELOW_S else Pace()
    with (
        model_folder(options) as folder,
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
    ):
        keys = Path(temporary)
        rows, on = _eventful(folder, options, pace, keys)
        row = _guarded("traffic", lambda: _quiet(folder, options, pace, keys, on))
        rows.append(row)
    show(rows, options)
    return rows


def _eventful(
    folder: Path, options: Options, pace: Pace, keys: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    on: dict[str, Any] = {}

    def jitter() -> dict[str, Any]:
        row, measured = phases.jitter(regions, options.seconds)
        on.update(measured)
        return row

    with open_regions(folder, options, pace, keys) as regions:
        for site in CLIENTS:
            regions.clients[site] = regions.join(
                site, "benchmarks.regions.client", step_timeout_s=pace.step_timeout_s
            )
        steps: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("settle", lambda: phases.settle(regions)),
            ("jitter", jitter),
            ("region lost", lambda: cut(regions)),
            ("hostile orchestrator", lambda: phases.stranger(regions)),
            ("liar", lambda: phases.liar(regions)),
        ]
        return [_guarded(name, step) for name, step in steps], on


def _guarded(name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, also of a phase that did not come to its end."""
    began = time.monotonic()
    try:
        row = step()
    except (NesaError, EmulatorError) as error:
        row = {"phase": name, "passed": False, "error": str(error)}
    row["took_s"] = time.monotonic() - began
    print(json.dumps(row, default=str), flush=True)
    return row


def _quiet(
    folder: Path, options: Options, pace: Pace, keys: Path, on: dict[str, Any]
) -> dict[str, Any]:
    """As many minutes of a swarm like the other, in which nobody measures."""
    with open_regions(folder, options, pace, keys, pings=False) as regions:
        _warm_up(regions)
        off = traffic.per_second(regions, options.seconds)
    growth = traffic.record_growth(mean(on["packed_bytes"]), pace.record_ttl_s)
    return traffic.summarize(on["rates"], off, growth, options.seconds)


def _warm_up(regions: Regions) -> None:
    shake(regions.wan, MORE_JITTER)
    time.sleep(2 * regions.pace.follow_every_s)


def show(rows: Sequence[dict[str, Any]], options: Options) -> None:
    cells = [
        (row["phase"], "yes" if row["passed"] else "NO", f"{row['took_s']:.0f}", _words(row))
        for row in rows
    ]
    title = f"regions: {options.model}, three regions of {options.nodes[0]} nodes"
    print_table(title, "phase|passed|took s|what", cells)


def _words(row: dict[str, Any]) -> str:
    skipped = ("phase", "passed", "took_s", "runs")
    return ", ".join(
        f"{key.replace('_', ' ')} {_short(value)}"
        for key, value in row.items()
        if key not in skipped
    )


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
