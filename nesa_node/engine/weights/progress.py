"""Progress reports of long loads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from nesa_node.core.logging import get_logger

log = get_logger(__name__)

_LOG_INTERVAL_S = 5.0


class Progress(Protocol):
    """Callback with `done` of `total` bytes of a task ("loading blocks"), from any thread."""

    def __call__(self, task: str, done: int, total: int) -> None: ...


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield a `Progress` that draws bars on a terminal, and else logs a line every few seconds."""
    if not sys.stderr.isatty():
        yield _ProgressLog()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, object] = {}

        def show(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done, total=total)  # type: ignore[arg-type]

        yield show


class _ProgressLog:
    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, task: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last.get(task, 0.0) < _LOG_INTERVAL_S:
            return
        self._last[task] = now
        log.info("loading_progressed", task=task, done_mib=done >> 20, total_mib=total >> 20)
