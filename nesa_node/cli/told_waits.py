"""Reports on stderr of what a command waits for, after two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nesa_node.core.waiting import Waits

LOOK_EVERY_S = 0.25
AGAIN_S = 10.0
"""Seconds until the same wait is reported again."""


@contextmanager
def told_waits() -> Iterator[None]:
    """Print the waits of the commands run in the context on stderr, as `[waiting for ...]`."""
    waits, over = Waits(), threading.Event()
    telling = threading.Thread(target=_tell, args=(waits, over), name="waits", daemon=True)
    telling.start()
    try:
        with waits.current():
            yield
    finally:
        over.set()
        telling.join()


def _tell(waits: Waits, over: threading.Event) -> None:
    last: tuple[object, ...] = ()
    again_at = 0.0
    while not over.wait(LOOK_EVERY_S):
        wait = waits.slow()
        if wait is not None and (wait.subject != last or time.monotonic() >= again_at):
            last, again_at = wait.subject, time.monotonic() + AGAIN_S
            # A streamed answer on the same terminal may be in the middle of a line.
            start = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
            with suppress(OSError, ValueError):
                print(f"{start}[{wait.text(waits.clock())}]", file=sys.stderr, flush=True)
