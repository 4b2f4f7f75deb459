"""A daemon's own part of the picture of the network: a ping now and then."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.distances import next_to_ping
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

PING_EVERY_S = 6.0
"""A ping takes 1 kB of the network, by all that is around its bytes."""
REFRESH_S = 90.0
LOOK_EVERY_S = 60.0
MAX_LOOK_S = 600.0
"""A look fetches all records, of a hundred nodes more than 100 kB. Who joins later looks and pings
first, and tells what it finds."""


async def keep_measuring(
    swarm: Swarm,
    model_id: ModelId,
    num_blocks: int,
    rng: random.Random,
    *,
    ping_every_s: float = PING_EVERY_S,
    refresh_s: float = REFRESH_S,
    look_every_s: float = LOOK_EVERY_S,
) -> None:
    """Ping the nodes of a model in turn, until cancelled. What comes of it is in `distances`.

    It begins with a look: what was seen before the model was loaded may have expired. The next
    comes after `look_every_s`, and each pause is three times as long as the one before, up to
    `MAX_LOOK_S`. Whoever was seen is pinged on, also when its record has expired here, until it
    does not answer.
    """
    look_at = time.monotonic()
    others: dict[PeerId, Sequence[str]] = {}
    while True:
        await asyncio.sleep(ping_every_s * rng.uniform(0.8, 1.2))
        try:
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + look_every_s
                look_every_s = min(3.0 * look_every_s, max(MAX_LOOK_S, look_every_s))
                await swarm.directory.glance(model_id)
            others = {peer: at for peer, at in others.items() if _is_near(swarm, peer)}
            others |= swarm.directory.addresses(model_id, num_blocks)
            others.pop(swarm.identity.peer_id, None)
            peer = next_to_ping(swarm.distances, sorted(others), rng, refresh_s=refresh_s)
            if peer is not None:
                await _measure(swarm, peer, others[peer])
        except (SwarmError, OSError) as error:
            log.info("not_measured", reason=str(error))
        except Exception:  # a mistake of ours: the node goes on, and so do its pings
            log.exception("not_measured")


async def _measure(swarm: Swarm, peer: PeerId, addresses: Sequence[str]) -> None:
    await swarm.distances.measure(swarm.transport, {peer: addresses})


def _is_near(swarm: Swarm, peer: PeerId) -> bool:
    """Whether it answered the last ping."""
    return not math.isnan(swarm.distances.rtt_ms(peer))
