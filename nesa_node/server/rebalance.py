"""A node's own rule where nobody plans for the swarm: fill holes that stay.

A swarm that has lost a region heals by it. Nodes whose blocks others hold too move to blocks that
nobody holds, and nobody else moves.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.server.moves import Moves
from nesa_node.sharding.holes import plan_repairs, unheld
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

JITTER = (0.8, 1.2)
"""Of the time between two looks, so that nodes do not all look at once."""


async def rebalance(
    look: Callable[[], Awaitable[Snapshot]],
    peer_id: PeerId,
    moves: Moves,
    *,
    every_s: float,
    rng: random.Random,
) -> None:
    """Look at the swarm about every `every_s` seconds, until cancelled.

    Blocks must lack a holder in two looks: a node that restarts, or a record that is late, is no
    reason to move. What else is wrong with a snapshot is for `Moves` and its limits to withstand.
    """
    before: frozenset[int] = frozenset()
    while True:
        await asyncio.sleep(every_s * rng.uniform(*JITTER))
        try:
            snapshot = await look()
        except (SwarmError, OSError) as error:
            log.warning("no_look_at_the_swarm", reason=str(error))
            continue
        except Exception:  # a mistake of ours: the node goes on, and holes still need filling
            log.exception("no_look_at_the_swarm")
            continue
        holes = unheld(snapshot)
        staying, before = holes & before, holes
        if not staying:
            continue
        # Strangers' records can make this take a second.
        repairs = await asyncio.to_thread(plan_repairs, snapshot, staying)
        span = repairs.get(peer_id)
        log.info("blocks_unheld", blocks=sorted(staying), mine=None if span is None else str(span))
        if span is not None:
            await moves.ask(span, "nobody holds these blocks").wait()
            before = frozenset()
