"""What a command waits for, on stderr, once that has lasted two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nesa_node.core.waiting import Waits

LOOK_EVERY_S = 0.25
AGAIN_S = 10.0
"""The same wait is told again after so long."""


@contextmanager
def told_waits() -> Iterator[None]:
    """Around a command: its waits are lines on stderr, `[waiting for ...]`."""
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
            # An answer that goes to the same terminal may stand in the middle of its line.
            start = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
            with suppress(OSError, ValueError):
                print(f"{start}[{wait.text(waits.clock())}]", file=sys.stderr, flush=True)
