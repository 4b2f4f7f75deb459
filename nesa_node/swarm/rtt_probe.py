"""Background pings by which a daemon measures its round-trip times."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.rtt import choose_ping_target

log = get_logger(__name__)

PING_INTERVAL_S = 6.0
"""A ping costs 1 kB of traffic, with all protocol overhead."""
PING_REFRESH_S = 90.0
FETCH_INTERVAL_S = 60.0
MAX_FETCH_INTERVAL_S = 600.0
"""Fetching the records of a hundred nodes takes more than 100 kB. Pauses may be long, since a node
that joins later pings first and publishes what it measured."""


async def probe_rtts(
    swarm: Swarm,
    model_id: ModelId,
    num_blocks: int,
    rng: random.Random,
    *,
    ping_interval_s: float = PING_INTERVAL_S,
    refresh_s: float = PING_REFRESH_S,
    fetch_interval_s: float = FETCH_INTERVAL_S,
) -> None:
    """Ping the nodes of a model in turn until cancelled, and record round trips in `swarm.rtts`.

    Records are fetched at the start, since those read before the model was loaded may have expired,
    then after `fetch_interval_s`, and then after pauses that triple up to `MAX_FETCH_INTERVAL_S`. A
    node that has been seen is pinged until it does not answer, even when its record has expired
    here.
    """
    fetch_at_s = time.monotonic()
    addresses: dict[PeerId, Sequence[str]] = {}
    while True:
        await asyncio.sleep(ping_interval_s * rng.uniform(0.8, 1.2))
        try:
            if time.monotonic() >= fetch_at_s:
                fetch_at_s = time.monotonic() + fetch_interval_s
                fetch_interval_s = min(
                    3.0 * fetch_interval_s, max(MAX_FETCH_INTERVAL_S, fetch_interval_s)
                )
                await swarm.directory.fetch_one(model_id)
            addresses = {peer: known for peer, known in addresses.items() if _has_rtt(swarm, peer)}
            addresses |= swarm.directory.addresses(model_id, num_blocks)
            addresses.pop(swarm.identity.peer_id, None)
            peer = choose_ping_target(swarm.rtts, sorted(addresses), rng, refresh_s=refresh_s)
            if peer is not None:
                await swarm.rtts.ping_all(swarm.transport, {peer: addresses[peer]})
        except (SwarmError, OSError) as error:
            log.info("ping_failed", reason=str(error))
        except Exception:  # a bug must end neither the node nor its pings
            log.exception("ping_failed")


def _has_rtt(swarm: Swarm, peer: PeerId) -> bool:
    """Whether `peer` answered its last ping."""
    return not math.isnan(swarm.rtts.rtt_ms(peer))
