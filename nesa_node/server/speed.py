"""Measures a span again when the machine has changed, so that the node's record stays true."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nesa_node.core.logging import get_logger
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.measure import MeasuringStopped, Throughput, measure_throughput
from nesa_node.engine.threads import IdleCores
from nesa_node.server.announcer import Announcer
from nesa_node.server.executor import Executor

log = get_logger(__name__)

LOOK_S = 5.0
CHANGED_CORES = 0.4
"""So many more or fewer idle cores are a change of the machine, if two looks find it."""
LEAST_PAUSE_S = 30.0
"""Between two measurements of an idle node, each of which takes the machine for a second or two."""
MOST_PAUSE_S = 600.0
NEWS = 0.1
"""A speed that differs by less than this share is not worth a new record."""


class MeasuringPolicy:
    """Decides when to measure again, from looks at a machine on which this node runs nothing."""

    def __init__(self, now: float) -> None:
        """At start the machine was busy, if only with loading: the first quiet looks measure."""
        self._measured_at = now
        self._idle_cores = math.nan
        """When it was measured."""
        self._changed_before = False

    def is_due(self, idle_cores: float, now: float) -> bool:
        """Whether to measure now, `idle_cores` being those since the last look."""
        age_s = now - self._measured_at
        # At first, compared with no number, everything is a change.
        changed = not abs(idle_cores - self._idle_cores) < CHANGED_CORES
        twice, self._changed_before = changed and self._changed_before, changed
        return age_s >= MOST_PAUSE_S or (twice and age_s >= LEAST_PAUSE_S)

    def measured(self, idle_cores: float, now: float) -> None:
        self._idle_cores, self._measured_at, self._changed_before = idle_cores, now, False

    def disturb(self) -> None:
        """This node itself ran something: the look says nothing."""
        self._changed_before = False


@asynccontextmanager
async def keep_speed_true(
    blocks: Blocks, executor: Executor, announcer: Announcer
) -> AsyncIterator[None]:
    """Meanwhile `announcer` tells how fast `blocks` run now, not how fast they once did."""
    ending = threading.Event()
    watching = asyncio.create_task(_watch(blocks, executor, announcer, ending))
    try:
        yield
    finally:
        ending.set()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    blocks: Blocks, executor: Executor, announcer: Announcer, ending: threading.Event
) -> None:
    policy, idle_cores = MeasuringPolicy(time.monotonic()), IdleCores()

    def measure() -> Throughput:
        return measure_throughput(blocks, stop=lambda: ending.is_set() or executor.has_queue)

    while True:
        await asyncio.sleep(LOOK_S)
        idle, now = idle_cores(), time.monotonic()
        if executor.idle_s < LOOK_S:
            policy.disturb()
        elif policy.is_due(idle, now):
            try:
                throughput = await executor.run(measure)
            except MeasuringStopped:
                continue
            except Exception:  # torch has errors of its own; what was announced stays
                log.exception("speed_not_measured")
                return
            policy.measured(idle, time.monotonic())
            idle_cores()  # From now on: the measurement itself is no change.
            if differs(throughput, announcer.throughput):
                announcer.throughput = throughput
                log.info(
                    "speed_changed", decode_tokens_per_s=round(throughput.decode_tokens_per_s, 1)
                )


def differs(one: Throughput, other: Throughput) -> bool:
    """Whether what others plan by is no longer true."""
    pairs = (
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.decode_tokens_per_s, other.decode_tokens_per_s),
    )
    return any(abs(new - old) > NEWS * old for new, old in pairs)
