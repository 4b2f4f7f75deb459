"""Repeated measurement of a span's speed when the machine has changed, so that the record stays
true.
"""

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
"""Change of idle cores that counts as a change of the machine, if two samples in a row show it."""
LEAST_PAUSE_S = 30.0
"""Least time between two measurements of an idle node, each of which uses the machine for a second
or two."""
MOST_PAUSE_S = 600.0
NEWS = 0.1
"""Smallest relative change of a speed that is published."""


class MeasuringPolicy:
    """Decides when to measure again, from samples of idle cores while this node runs nothing."""

    def __init__(self, now: float) -> None:
        """The machine was busy at start, if only with loading: the first quiet samples cause a
        measurement.
        """
        self._measured_at = now
        self._idle_cores = math.nan
        """Idle cores at the last measurement."""
        self._changed_before = False

    def is_due(self, idle_cores: float, now: float) -> bool:
        """Whether to measure now; `idle_cores` is the mean since the last sample."""
        age_s = now - self._measured_at
        # At first, compared with NaN, every value is a change.
        changed = not abs(idle_cores - self._idle_cores) < CHANGED_CORES
        twice, self._changed_before = changed and self._changed_before, changed
        return age_s >= MOST_PAUSE_S or (twice and age_s >= LEAST_PAUSE_S)

    def measured(self, idle_cores: float, now: float) -> None:
        self._idle_cores, self._measured_at, self._changed_before = idle_cores, now, False

    def disturb(self) -> None:
        """Discard the sample: this node itself ran something."""
        self._changed_before = False


@asynccontextmanager
async def keep_speed_true(
    blocks: Blocks, executor: Executor, announcer: Announcer
) -> AsyncIterator[None]:
    """Keep the announced speed of `blocks` current while the body runs."""
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
            except Exception:  # torch has its own errors; the announced speed stays
                log.exception("speed_not_measured")
                return
            policy.measured(idle, time.monotonic())
            idle_cores()  # Start a new sample: the measurement itself is no change.
            if differs(throughput, announcer.throughput):
                announcer.throughput = throughput
                log.info(
                    "speed_changed", decode_tokens_per_s=round(throughput.decode_tokens_per_s, 1)
                )


def differs(one: Throughput, other: Throughput) -> bool:
    """Whether a speed changed by more than `NEWS`."""
    pairs = (
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.decode_tokens_per_s, other.decode_tokens_per_s),
    )
    return any(abs(new - old) > NEWS * old for new, old in pairs)
