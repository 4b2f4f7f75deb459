"""A span as this node serves it, and its speed, measured again when the machine has changed."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import NodeConfig
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.kernels.threads import IdleCores
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import MeasurementCancelled, SpanThroughput, measure_throughput
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.files import show_progress
from nesa_node.server.node.announcer import Announcer, Capacity
from nesa_node.server.node.span_choice import NodeModel, count_cache_tokens
from nesa_node.server.scheduler.batch import Executor
from nesa_node.server.scheduler.scheduler import Scheduler
from nesa_node.server.session.admission import Admission, AdmissionLimits
from nesa_node.server.session.message_loop import RefusalLog
from nesa_node.server.session.session_server import SessionServer
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import running_in_background

log = get_logger(__name__)

HIDDEN_BYTES_PER_CACHE_BYTE = 1.0
MIN_HIDDEN_BYTES = 256 << 20
MAX_PEER_QUARTERS = 3
"""Most quarters of the room for hidden states that one peer gets, for a session of the model's
whole length. Otherwise it gets half: long sessions fill this room long before the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpan:
    blocks: ModelBlocks
    throughput: SpanThroughput
    admission: Admission
    server: SessionServer
    scheduler: Scheduler

    def capacity(self) -> Capacity:
        return Capacity(
            total_tokens=self.admission.max_tokens,
            free_tokens=self.admission.free_tokens,
            load=self.scheduler.load,
            sessions=self.scheduler.sessions,
            tokens=self.scheduler.stats.tokens,
        )


@asynccontextmanager
async def open_span(
    config: NodeConfig,
    served: NodeModel,
    swarm: Swarm,
    scheduler: Scheduler,
    span: Span,
    refusals: RefusalLog | None = None,
) -> AsyncIterator[ServedSpan]:
    """Load and measure `span`, and allocate its cache. On exit no session uses it any more.

    The memory is freed once the caller has dropped its references too. `refusals` is shared by all
    spans of the daemon. Raises `ModelError`, `ResourceError` and `OSError`.
    """
    device = scheduler.executor
    with track_wait("weights to be loaded", blocks=(span,)):
        blocks = await device.run(partial(_load, served, span))
    log.info("speed_measurement_started", span=str(span), reason="clients choose nodes by it")
    with track_wait("the speed to be measured", blocks=(span,)):
        throughput = await device.run(partial(measure_throughput, blocks))
    scheduler.seed_cost(throughput, span)
    tokens = count_cache_tokens(config, blocks)
    pool = await device.run(partial(blocks.new_pool, tokens))
    admission = Admission(_limits(config, blocks, tokens), pool)
    server = SessionServer(
        swarm,
        served.model_id,
        blocks,
        scheduler,
        admission,
        swarm_key=secret_text(config.swarm_key),
        step_timeout_s=config.step_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        refusals=refusals,
    )
    try:
        yield ServedSpan(
            blocks=blocks,
            throughput=throughput,
            admission=admission,
            server=server,
            scheduler=scheduler,
        )
    finally:
        await server.close()


def _load(served: NodeModel, span: Span) -> ModelBlocks:
    with show_progress() as progress:
        return load_blocks(
            served.checkpoint,
            span,
            dtype=served.dtype,
            device=served.device,
            quant_type=served.quant_type,
            progress=progress,
        )


def _limits(config: NodeConfig, blocks: ModelBlocks, tokens: int) -> AdmissionLimits:
    """The limits for a cache of `tokens`."""
    of_cache = int(tokens * blocks.cache_bytes_per_token * HIDDEN_BYTES_PER_CACHE_BYTE)
    per_token = blocks.hidden_size * 4
    needed = tokens * per_token
    # No peer may take all of it, but a single session can use the model's whole length.
    half = max(tokens // 2, min(tokens, blocks.context_length or tokens))
    hidden_bytes = max(min(of_cache, needed), MIN_HIDDEN_BYTES)
    whole = (blocks.context_length or tokens) * per_token
    return AdmissionLimits(
        hidden_bytes=hidden_bytes,
        hidden_bytes_per_peer=min(
            max(hidden_bytes // 2, whole), MAX_PEER_QUARTERS * hidden_bytes // 4
        ),
        hidden_bytes_per_token=per_token,
        hidden_reserve_bytes=hidden_bytes // 4,
        sessions_per_peer=config.max_sessions_per_peer,
        cache_tokens_per_peer=config.max_cache_tokens_per_peer or half,
        allow=frozenset(config.allow_peers),
        deny=frozenset(config.deny_peers),
        trusted=frozenset(config.trusted_peers),
    )


SAMPLE_INTERVAL_S = 5.0
MIN_CORE_CHANGE = 0.4
"""Change of idle cores that counts as a change of the machine, if two samples in a row show it."""
MIN_MEASURE_INTERVAL_S = 30.0
"""Least time between two measurements of an idle node, each of which uses the machine for a second
or two."""
MAX_MEASURE_INTERVAL_S = 600.0
MIN_SPEED_CHANGE = 0.1
"""Smallest relative change of a speed that is published."""


class RemeasurePolicy:
    """Decides when to measure again, from samples of idle cores while this node runs nothing."""

    def __init__(self, now: float) -> None:
        # The machine was busy at start, if only with loading: the first quiet samples cause a
        # measurement.
        self._measured_at = now
        self._idle_cores = math.nan
        """Idle cores at the last measurement."""
        self._changed_last_time = False

    def is_due(self, idle_cores: float, now: float) -> bool:
        """Whether to measure now; `idle_cores` is the mean since the last sample."""
        age_s = now - self._measured_at
        # At first, compared with NaN, every value is a change.
        changed = not abs(idle_cores - self._idle_cores) < MIN_CORE_CHANGE
        twice, self._changed_last_time = changed and self._changed_last_time, changed
        return age_s >= MAX_MEASURE_INTERVAL_S or (twice and age_s >= MIN_MEASURE_INTERVAL_S)

    def record_measurement(self, idle_cores: float, now: float) -> None:
        self._idle_cores, self._measured_at, self._changed_last_time = idle_cores, now, False

    def discard_sample(self) -> None:
        """Discard the sample: this node itself ran something."""
        self._changed_last_time = False


@asynccontextmanager
async def keep_speed_current(
    blocks: ModelBlocks, executor: Executor, announcer: Announcer
) -> AsyncIterator[None]:
    """Keep the announced speed of `blocks` current while the body runs."""
    ending = threading.Event()
    async with running_in_background(_remeasure_loop(blocks, executor, announcer, ending)):
        try:
            yield
        finally:
            ending.set()


async def _remeasure_loop(
    blocks: ModelBlocks, executor: Executor, announcer: Announcer, ending: threading.Event
) -> None:
    policy, idle_cores = RemeasurePolicy(time.monotonic()), IdleCores()

    def measure() -> SpanThroughput:
        return measure_throughput(blocks, stop=lambda: ending.is_set() or executor.has_queue)

    while True:
        # Several nodes of one computer are not to measure at the same time.
        await asyncio.sleep(SAMPLE_INTERVAL_S * random.uniform(0.8, 1.2))
        idle, now = idle_cores(), time.monotonic()
        if executor.idle_s < SAMPLE_INTERVAL_S:
            policy.discard_sample()
        elif policy.is_due(idle, now):
            try:
                throughput = await executor.run(measure)
            except MeasurementCancelled:
                continue
            except Exception:  # torch has its own errors; the announced speed stays
                log.exception("speed_not_measured")
                return
            policy.record_measurement(idle, time.monotonic())
            idle_cores()  # Start a new sample: the measurement itself is no change.
            if speeds_differ(throughput, announcer.throughput):
                announcer.throughput = throughput
                log.info(
                    "speed_changed", decode_tokens_per_s=round(throughput.decode_tokens_per_s, 1)
                )


def speeds_differ(one: SpanThroughput, other: SpanThroughput) -> bool:
    """Whether a speed changed by more than `MIN_SPEED_CHANGE`."""
    pairs = (
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.decode_tokens_per_s, other.decode_tokens_per_s),
    )
    return any(abs(new - old) > MIN_SPEED_CHANGE * old for new, old in pairs)
