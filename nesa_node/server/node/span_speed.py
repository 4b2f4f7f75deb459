"""The speed that a node announces: that of its served steps, or one measured while it is idle."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nesa_node.core.logging import get_logger
from nesa_node.engine.kernels.threads import IdleCores
from nesa_node.engine.model.devices import MeasurementCancelled, SpanThroughput
from nesa_node.engine.model.machine_figures import MEASUREMENT_LOCK
from nesa_node.server.node.announcer import Announcer
from nesa_node.server.scheduler.batch import Executor
from nesa_node.swarm.p2p.tasks import running_in_background

log = get_logger(__name__)

Measure = Callable[[Callable[[], bool]], SpanThroughput]
"""Measures a span in the device's thread. Raises `MeasurementCancelled` once its argument returns
true."""
TakeServed = Callable[[SpanThroughput], SpanThroughput | None]
"""What was announced, with the speed of what was served since the last call; None of too little."""

SAMPLE_INTERVAL_S = 5.0
MIN_CORE_CHANGE = 0.4
"""Change of idle cores that counts as a change of the machine, if two samples in a row show it."""
MIN_MEASURE_INTERVAL_S = 30.0
"""Least time between two measurements of an idle node, each of which uses the machine for a second
or two, and between two announcements of served speeds."""
MAX_MEASURE_INTERVAL_S = 600.0
MIN_SPEED_CHANGE = 0.05
"""Smallest relative change of a speed that is published."""


class RemeasurePolicy:
    """Decides when to measure again, from samples of idle cores while this node runs nothing.

    A served speed is one of the machine as it is: it is measured again once the machine changes, or
    after `MAX_MEASURE_INTERVAL_S` without another.
    """

    def __init__(self, now: float) -> None:
        # The machine was busy at start, if only with loading: the first quiet samples cause a
        # measurement.
        self._measured_at = now
        self._idle_cores: float | None = math.nan
        """Idle cores at the last measurement; None for those of the next sample."""
        self._served_at = -math.inf
        self._changed_last_time = False

    def is_due(self, idle_cores: float, now: float) -> bool:
        """Whether to measure now; `idle_cores` is the mean since the last sample."""
        age_s = now - self._measured_at
        if self._idle_cores is None:
            self._idle_cores = idle_cores
        # At first, compared with NaN, every value is a change.
        changed = not abs(idle_cores - self._idle_cores) < MIN_CORE_CHANGE
        twice, self._changed_last_time = changed and self._changed_last_time, changed
        return age_s >= MAX_MEASURE_INTERVAL_S or (twice and age_s >= MIN_MEASURE_INTERVAL_S)

    def record_measurement(self, idle_cores: float, now: float) -> None:
        self._idle_cores, self._measured_at, self._changed_last_time = idle_cores, now, False

    def may_use_served(self, now: float) -> bool:
        """Whether the last announcement of a served speed is old enough for another."""
        return now - self._served_at >= MIN_MEASURE_INTERVAL_S

    def record_served(self, now: float) -> None:
        """Record that the speed of served steps is announced."""
        self._served_at = self._measured_at = now
        self._idle_cores, self._changed_last_time = None, False

    def discard_sample(self) -> None:
        """Discard the sample: this node itself ran something."""
        self._changed_last_time = False


@asynccontextmanager
async def keep_speed_current(
    executor: Executor,
    announcer: Announcer,
    cache_dir: Path,
    *,
    measure: Measure,
    take_served: TakeServed,
) -> AsyncIterator[None]:
    """Keep the announced speed of a span current while the body runs.

    Processes with the same `cache_dir` measure one at a time.
    """
    ending = threading.Event()
    loop = _SpeedLoop(executor, announcer, cache_dir, ending, measure, take_served)
    async with running_in_background(loop.run()):
        try:
            yield
        finally:
            ending.set()


class _SpeedLoop:
    def __init__(
        self,
        executor: Executor,
        announcer: Announcer,
        cache_dir: Path,
        ending: threading.Event,
        measure: Measure,
        take_served: TakeServed,
    ) -> None:
        self._executor, self._announcer = executor, announcer
        self._cache_dir, self._ending = cache_dir, ending
        self._measure_span, self._take_served = measure, take_served
        self._policy = RemeasurePolicy(time.monotonic())
        self._idle_cores = IdleCores()

    async def run(self) -> None:
        """Look at intervals until cancelled, or until a measurement fails."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S * random.uniform(0.8, 1.2))
            idle, now = self._idle_cores(), time.monotonic()
            if self._policy.may_use_served(now):
                self._use_served(now)
            if self._executor.idle_s < SAMPLE_INTERVAL_S:
                self._policy.discard_sample()
            elif self._policy.is_due(idle, now) and not await self._measure(idle):
                return

    def _use_served(self, now: float) -> None:
        """Announce the speed of what was served, if that was enough."""
        throughput = self._take_served(self._announcer.throughput)
        if throughput is not None:
            self._policy.record_served(now)
            self._announce(throughput)

    async def _measure(self, idle_cores: float) -> bool:
        """Measure, unless other work needs the device. Returns whether that may be tried again."""
        try:
            throughput = await self._executor.run(self._measure_alone)
        except (MeasurementCancelled, Timeout):
            return True
        except Exception:  # torch has its own errors; the announced speed stays
            log.exception("speed_not_measured")
            return False
        self._policy.record_measurement(idle_cores, time.monotonic())
        self._idle_cores()  # Start a new sample: the measurement itself is no change.
        self._announce(throughput)
        return True

    def _measure_alone(self) -> SpanThroughput:
        """Raises `Timeout` while another process of this computer measures."""

        def stop() -> bool:
            return self._ending.is_set() or self._executor.has_queue

        self._cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(self._cache_dir / MEASUREMENT_LOCK, timeout=0):
            return self._measure_span(stop)

    def _announce(self, throughput: SpanThroughput) -> None:
        if speeds_differ(throughput, self._announcer.throughput):
            self._announcer.throughput = throughput
            log.info("speed_changed", decode_tokens_per_s=round(throughput.decode_tokens_per_s, 1))


def speeds_differ(one: SpanThroughput, other: SpanThroughput) -> bool:
    """Whether a speed changed by more than `MIN_SPEED_CHANGE`."""
    pairs = (
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.decode_tokens_per_s, other.decode_tokens_per_s),
    )
    return any(abs(new - old) > MIN_SPEED_CHANGE * old for new, old in pairs)
