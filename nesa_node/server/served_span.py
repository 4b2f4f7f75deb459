"""A span as this node serves it: weights, cache, and the sessions that use both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from nesa_node.core.config import NodeConfig, secret_text
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.core.waiting import waiting
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.measure import Throughput, measure_throughput
from nesa_node.engine.parts import load_blocks
from nesa_node.engine.progress import shown_progress
from nesa_node.server.admission import Admission, Limits
from nesa_node.server.announcer import Capacity
from nesa_node.server.placement import count_cache_tokens
from nesa_node.server.refusal_log import RefusalLog
from nesa_node.server.scheduler import Scheduler
from nesa_node.server.served import Served
from nesa_node.server.session_server import SessionServer
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

HIDDEN_BYTES_PER_CACHE_BYTE = 1.0
MIN_HIDDEN_BYTES = 256 << 20
MAX_SHARE = 3
"""Most quarters of the room for hidden states that one peer gets, for a session of the model's
whole length. Otherwise it gets half: long sessions fill this room long before the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpan:
    blocks: Blocks
    throughput: Throughput
    admission: Admission
    server: SessionServer
    scheduler: Scheduler

    def capacity(self) -> Capacity:
        return Capacity(
            total_tokens=self.admission.most_tokens,
            free_tokens=self.admission.free_tokens,
            load=self.scheduler.load,
            sessions=self.scheduler.sessions,
            tokens=self.scheduler.tallies.tokens,
        )


@asynccontextmanager
async def open_span(
    config: NodeConfig,
    served: Served,
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
    with waiting("weights to be loaded", blocks=(span,)):
        blocks = await device.run(partial(_load, served, span))
    log.info("speed_measurement_started", span=str(span), reason="clients choose nodes by it")
    with waiting("the speed to be measured", blocks=(span,)):
        throughput = await device.run(partial(measure_throughput, blocks))
    scheduler.expect(throughput, span)
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


def _load(served: Served, span: Span) -> Blocks:
    with shown_progress() as progress:
        return load_blocks(
            served.checkpoint,
            span,
            dtype=served.dtype,
            device=served.device,
            quant_type=served.quant_type,
            progress=progress,
        )


def _limits(config: NodeConfig, blocks: Blocks, tokens: int) -> Limits:
    """The limits for a cache of `tokens`."""
    of_cache = int(tokens * blocks.cache_bytes_per_token * HIDDEN_BYTES_PER_CACHE_BYTE)
    per_token = blocks.hidden_size * 4
    needed = tokens * per_token
    # No peer may take all of it, but a single session can use the model's whole length.
    half = max(tokens // 2, min(tokens, blocks.context_length or tokens))
    hidden_bytes = max(min(of_cache, needed), MIN_HIDDEN_BYTES)
    whole = (blocks.context_length or tokens) * per_token
    return Limits(
        hidden_bytes=hidden_bytes,
        hidden_bytes_per_peer=min(max(hidden_bytes // 2, whole), MAX_SHARE * hidden_bytes // 4),
        hidden_bytes_per_token=per_token,
        hidden_reserve_bytes=hidden_bytes // 4,
        sessions_per_peer=config.max_sessions_per_peer,
        cache_tokens_per_peer=config.max_cache_tokens_per_peer or half,
        allow=frozenset(config.allow_peers),
        deny=frozenset(config.deny_peers),
        trusted=frozenset(config.trusted_peers),
    )
