"""Which event loop runs the network."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop's loop where there is one.

    Bare bytes go to and fro in a third less time on it. Beside what a daemon computes for a step
    the difference is lost in the noise. Two such loops of a process must not start a child at once.
    """
    try:
        import uvloop
    except ImportError:  # not made for every system
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
