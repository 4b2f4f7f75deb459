"""Measurement of a node's decode speed by a session through that node alone."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import torch

from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.session import RemoteSession
from nesa_node.core.errors import NesaError
from nesa_node.core.logging import get_logger
from nesa_node.routing.chain_request import VISIT_OVERHEAD_S
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.link_measurements import ping
from nesa_node.swarm.protocol.messages import RowSlice
from nesa_node.topology.snapshot import NodeState

log = get_logger(__name__)

PIPELINED_STEPS = 16
"""Steps sent without waiting for their outputs: the round trip is paid once, not for each step."""
SEQUENTIAL_STEPS = 6
"""Steps sent one after another. A node may batch pipelined steps, and a batch takes little longer
than one step where reading the weights dominates; single steps cannot be batched."""
_AUDIT_TIMEOUT_S = 20.0


async def measure_speed(swarm: Swarm, node: NodeState, request: RouteRequest) -> float | None:
    """Measure how many tokens/s `node` decodes through its whole span; None if that fails.

    `request` is that of a session of the same model. The measuring session has one row and only
    this node. The step time is the larger of two: the faster of two rounds of `PIPELINED_STEPS`
    pipelined steps, less a round trip (but at least half of the round, which bounds the gain of a
    node that delays its pings to a factor of two), and the fastest of `SEQUENTIAL_STEPS` single
    steps, less a round trip and `VISIT_OVERHEAD_S`. Sends `4 * PIPELINED_STEPS + 2 *
    SEQUENTIAL_STEPS` hidden states over the wire.
    """
    alone = replace(
        request,
        span=node.span,
        rows=1,
        max_tokens=2 * PIPELINED_STEPS + SEQUENTIAL_STEPS,
        allowed_peers=frozenset({node.peer_id}),
        prefix=(),
        options=replace(
            request.options,
            replicate_cache=False,
            recovery_timeout_s=_AUDIT_TIMEOUT_S / 4,
            queue_timeout_s=_AUDIT_TIMEOUT_S / 4,
            step_timeout_s=_AUDIT_TIMEOUT_S / 4,
        ),
    )
    session = RemoteSession(swarm, alone, ChainPlanner(swarm), OpenLimiter(), rng=random.Random())

    async def time_steps(count: int) -> float:
        start = session.lengths[0]
        generator = torch.Generator().manual_seed(start)
        hidden_TD = torch.randn((count, request.hidden_size), generator=generator)
        started = time.perf_counter()
        await session.step(hidden_TD, [RowSlice(0, start, count)], chunk_tokens=1)
        return time.perf_counter() - started

    try:
        async with asyncio.timeout(_AUDIT_TIMEOUT_S):
            await session.open()
            rounds_s = [await time_steps(PIPELINED_STEPS) for _ in range(2)]
            singles_s = [await time_steps(1) for _ in range(SEQUENTIAL_STEPS)]
            rtt_ms = await ping(swarm.transport, node.peer_id, node.addresses)
    except (NesaError, TimeoutError) as error:
        log.info("node_audit_failed", peer=node.peer_id, reason=str(error))
        return None
    finally:
        await session.close()
    round_s, rtt_s = min(rounds_s), rtt_ms / 1000
    together_s = max(round_s - rtt_s, round_s / 2) / PIPELINED_STEPS
    return 1 / max(together_s, min(singles_s) - rtt_s - VISIT_OVERHEAD_S)
