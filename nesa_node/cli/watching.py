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

from nesa_node.cli.reading import joined_reader, read_records
from nesa_node.cli.swarm_view import Gone, absence, group_by_model, make_console, models_view
from nesa_node.core.config import ClientConfig
from nesa_node.core.errors import ConfigError
from nesa_node.swarm.records import NodeRecord

BOUNDS_S = (0.2, 3600.0)
KEEP_S = 600.0
"""Seconds for which departed nodes are shown."""
MOST_GONE = 200


def check_interval(seconds: float) -> float:
    """Return `seconds`; raise `ConfigError` if it is out of range."""
    least, most = BOUNDS_S
    if not least <= seconds <= most:
        raise ConfigError(f"--watch {seconds:g}: give {least:g} to {most:g} seconds")
    return seconds


class Goings:
    """Tracker of departed nodes. `clock` returns Unix seconds, as in records."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: Mapping[str, NodeRecord] = {}
        self._gone: dict[str, tuple[NodeRecord, float, Literal["lost", "left"]]] = {}

    def saw(self, records: Sequence[NodeRecord]) -> list[Gone]:
        """Process the current records; return departed nodes, the latest first."""
        now, here = self._clock(), {record.peer_id: record for record in records}
        for peer, record in self._last.items():
            if peer not in here:
                # A node that leaves in order withdraws its record before that expires.
                how: Literal["lost", "left"] = "lost" if record.expires_at <= now else "left"
                self._gone[peer] = (record, now, how)
        self._last = here
        kept = sorted(
            (entry for peer, entry in self._gone.items() if peer not in here),
            key=lambda entry: -entry[1],
        )[:MOST_GONE]
        self._gone = {record.peer_id: (record, at, how) for record, at, how in kept}
        return [Gone(record, now - at, how) for record, at, how in kept if now - at < KEEP_S]


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of the swarm: its records, departed nodes, and rejected records by reason."""

    records: Sequence[NodeRecord]
    gone: Sequence[Gone]
    dropped: Mapping[str, int]


async def watch(config: ClientConfig, every_s: float, show: Callable[[Look], None]) -> None:
    """Read the swarm every `every_s` seconds until cancelled. Raises `BootstrapError`."""
    goings = Goings()
    async with joined_reader(config) as swarm:
        while True:
            started = time.monotonic()
            seen = await read_records(swarm)
            show(Look(seen.records, goings.saw(seen.records), seen.dropped))
            await asyncio.sleep(max(every_s - (time.monotonic() - started), 0.1))


@contextmanager
def table(wanted: str | None) -> Iterator[Callable[[Look], None]]:
    """Yield a function that shows a reading on stdout."""
    console = make_console(sys.stdout)

    def view(look: Look, width: int) -> Group:
        return models_view(
            group_by_model(look.records, wanted),
            width=width,
            gone=[gone for gone in look.gone if group_by_model([gone.record], wanted)],
            missing=absence(look.records, wanted),
        )

    if not console.is_terminal:

        def print_it(look: Look) -> None:
            console.print(time.strftime("--- %H:%M:%S"))
            console.print(view(look, console.width))
            sys.stdout.flush()

        yield print_it
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def replace(look: Look) -> None:
            live.update(view(look, console.width), refresh=True)

        yield replace
