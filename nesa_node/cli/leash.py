"""Shutdown when the parent process ends, even if it is killed: the pipe to stdin closes then."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leash(stopping: asyncio.Event) -> Iterator[None]:
    """Set `stopping` when standard input ends. Its content is discarded."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stopping.set()

    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
