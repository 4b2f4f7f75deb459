"""Repeated display of the swarm's table: in place on a terminal, else one after the other."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Group
from rich.live import Live

from nesa_node.cli.swarm_reader import open_reader, read_records
from nesa_node.cli.views.swarm import (
    PIPE_WIDTH_CHARS,
    DepartedNode,
    describe_absence,
    group_by_model,
    render_models,
)
from nesa_node.cli.views.text_parts import make_console
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.models import ClientConfig
from nesa_node.swarm.dht.records import NodeRecord

INTERVAL_BOUNDS_S = (0.2, 3600.0)
SHOW_DEPARTED_S = 600.0
"""Seconds for which departed nodes are shown."""
MAX_DEPARTED_NODES = 200


def check_interval(seconds: float) -> float:
    """Return `seconds`; raise `ConfigError` if it is out of range."""
    least, most = INTERVAL_BOUNDS_S
    if not least <= seconds <= most:
        raise ConfigError(f"--watch {seconds:g}: give {least:g} to {most:g} seconds")
    return seconds


class DepartureTracker:
    """Tracker of departed nodes. `clock` returns Unix seconds, as in records."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_records: Mapping[str, NodeRecord] = {}
        self._departed: dict[str, tuple[NodeRecord, float, Literal["lost", "left"]]] = {}

    def update(self, records: Sequence[NodeRecord]) -> list[DepartedNode]:
        """Process the current records; return departed nodes, the latest first."""
        now, here = self._clock(), {record.peer_id: record for record in records}
        for peer, record in self._last_records.items():
            if peer not in here:
                # A node that leaves in order withdraws its record before that expires.
                how: Literal["lost", "left"] = "lost" if record.expires_at <= now else "left"
                self._departed[peer] = (record, now, how)
        self._last_records = here
        kept = sorted(
            (entry for peer, entry in self._departed.items() if peer not in here),
            key=lambda entry: -entry[1],
        )[:MAX_DEPARTED_NODES]
        self._departed = {record.peer_id: (record, at, how) for record, at, how in kept}
        return [
            DepartedNode(record, now - at, how)
            for record, at, how in kept
            if now - at < SHOW_DEPARTED_S
        ]


@dataclass(frozen=True, slots=True)
class WatchFrame:
    """One reading of the swarm: its records, departed nodes, and rejected records by reason."""

    records: Sequence[NodeRecord]
    departed: Sequence[DepartedNode]
    dropped: Mapping[str, int]


async def watch_swarm(
    config: ClientConfig, every_s: float, show: Callable[[WatchFrame], None]
) -> None:
    """Read the swarm every `every_s` seconds until cancelled. Raises `BootstrapError`."""
    goings = DepartureTracker()
    async with open_reader(config) as swarm:
        while True:
            started = time.monotonic()
            seen = await read_records(swarm)
            show(WatchFrame(seen.records, goings.update(seen.records), seen.dropped))
            await asyncio.sleep(max(every_s - (time.monotonic() - started), 0.1))


@contextmanager
def open_watch_table(wanted: str | None) -> Iterator[Callable[[WatchFrame], None]]:
    """Yield a function that shows a reading on stdout."""
    console = make_console(sys.stdout, PIPE_WIDTH_CHARS)

    def view(look: WatchFrame) -> Group:
        return render_models(
            group_by_model(look.records, wanted),
            width=console.width,
            departed=[gone for gone in look.departed if group_by_model([gone.record], wanted)],
            missing=describe_absence(look.records, wanted),
        )

    def print_below(look: WatchFrame) -> None:
        console.print(time.strftime("--- %H:%M:%S"))
        console.print(view(look))
        sys.stdout.flush()

    if not console.is_terminal:
        yield print_below
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield lambda look: live.update(view(look), refresh=True)
