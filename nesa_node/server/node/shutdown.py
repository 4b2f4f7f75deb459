"""Shutdown of a daemon: by a signal, or by the loss of libp2p's daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nesa_node.core.errors import SwarmError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.p2p.transport import Transport

log = get_logger(__name__)

T = TypeVar("T")


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        log.info("stop_requested", signal=number.name)
        stopping.set()
        loop.remove_signal_handler(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def stop_on_stdin_end(stopping: asyncio.Event) -> Iterator[None]:
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


class Shutdown:
    """Waits for either reason to shut down."""

    def __init__(self, requested: asyncio.Event, transport: Transport) -> None:
        self._requested = requested
        self._p2pd_lost = transport.daemon_exited

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested.is_set()

    async def wait(self) -> None:
        """Return when a stop is requested. Raises `SwarmError` if libp2p's daemon has ended."""
        waits = [asyncio.create_task(event.wait()) for event in (self._requested, self._p2pd_lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if self._p2pd_lost.is_set() and not self._requested.is_set():
            raise SwarmError("libp2p's daemon (p2pd) has ended; restart this node")

    async def run_until_shutdown(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None, and `work` is cancelled, if the shutdown comes first.

        Raises what `work` raises, and `SwarmError` as `wait` does.
        """
        working = asyncio.create_task(work)
        ended = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            await _cancel_and_wait(working)
            ended.result()
            return None
        finally:
            await _cancel_and_wait(working)
            await _cancel_and_wait(ended)


async def _cancel_and_wait(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
