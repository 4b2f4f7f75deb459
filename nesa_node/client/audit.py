"""How fast a node really is: a few steps through it alone, timed from here."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import torch

from nesa_node.client.line import Line
from nesa_node.client.planner import Planner
from nesa_node.client.request import RouteRequest
from nesa_node.client.session import RemoteSession
from nesa_node.core.errors import NesaError
from nesa_node.core.logging import get_logger
from nesa_node.routing.build import VISIT_S
from nesa_node.swarm.messages import RowSlice
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.ping import ping
from nesa_node.topology.snapshot import NodeState

log = get_logger(__name__)

STEPS = 16
"""Sent at once: a long way to the node counts once, not once for each."""
SINGLES = 6
"""Sent one after another: steps that wait together a node may run together, which takes it little
more time than one alone where that is the reading of weights."""
_TIMEOUT_S = 20.0


async def measure_speed(swarm: Swarm, node: NodeState, request: RouteRequest) -> float | None:
    """Tokens/s that `node` decodes through its whole span; None where that cannot be measured.

    `request` is that of some session with the node's model. A session of one row is opened with
    this node alone. The faster of two rounds of `STEPS` steps is what it can do at most; a node
    that answers pings late to seem fast gains a factor of two there. Nor is it faster than the
    shortest of `SINGLES` steps, less a round trip, and what planners count for a visit anyway.
    Costs `4 * STEPS + 2 * SINGLES` hidden states on the wire.
    """
    alone = replace(
        request,
        span=node.span,
        rows=1,
        max_tokens=2 * STEPS + SINGLES,
        only=frozenset({node.peer_id}),
        prefix=(),
        replicates=False,
    )
    session = RemoteSession(
        swarm,
        alone,
        Planner(swarm),
        Line(),
        recovery_timeout_s=_TIMEOUT_S / 4,
        queue_timeout_s=_TIMEOUT_S / 4,
        step_timeout_s=_TIMEOUT_S / 4,
        rng=random.Random(),
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await session.open()
            rounds_s = [await _round_s(session, start, STEPS, alone) for start in (0, STEPS)]
            singles_s = [
                await _round_s(session, 2 * STEPS + each, 1, alone) for each in range(SINGLES)
            ]
            rtt_ms = await ping(swarm.transport, node.peer_id, node.addresses)
    except (NesaError, TimeoutError) as error:
        log.info("not_audited", peer=node.peer_id, reason=str(error))
        return None
    finally:
        await session.close()
    round_s, rtt_s = min(rounds_s), rtt_ms / 1000
    together_s = max(round_s - rtt_s, round_s / 2) / STEPS
    return 1 / max(together_s, min(singles_s) - rtt_s - VISIT_S)


async def _round_s(session: RemoteSession, start: int, steps: int, request: RouteRequest) -> float:
    generator = torch.Generator().manual_seed(start)
    shape = (steps, request.hidden_size)
    hidden_TD = torch.randn(shape, generator=generator, dtype=torch.float32)
    started = time.perf_counter()
    await session.step(hidden_TD, [RowSlice(0, start, steps)], chunk_tokens=1)
    return time.perf_counter() - started
