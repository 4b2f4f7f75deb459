"""A node's own rule where no orchestrator plans: fill holes that persist.

It heals a swarm that has lost a region. Nodes with blocks that have other holders move to blocks
without one; all other nodes stay.
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
"""Jitter of the interval between snapshots, so that nodes do not fetch at the same time."""


async def rebalance(
    look: Callable[[], Awaitable[Snapshot]],
    peer_id: PeerId,
    moves: Moves,
    *,
    every_s: float,
    rng: random.Random,
) -> None:
    """Check for holes about every `every_s` seconds, until cancelled.

    A block must lack a holder in two consecutive snapshots: a restarting node or a late record is
    no reason to move. `Moves` and its limits contain the effect of other wrong snapshots.
    """
    before: frozenset[int] = frozenset()
    while True:
        await asyncio.sleep(every_s * rng.uniform(*JITTER))
        try:
            snapshot = await look()
        except (SwarmError, OSError) as error:
            log.warning("snapshot_not_fetched", reason=str(error))
            continue
        except Exception:  # a bug: the node continues, and holes still need filling
            log.exception("snapshot_not_fetched")
            continue
        holes = unheld(snapshot)
        staying, before = holes & before, holes
        if not staying:
            continue
        # Records of hostile nodes can make this take a second.
        repairs = await asyncio.to_thread(plan_repairs, snapshot, staying)
        span = repairs.get(peer_id)
        log.info("blocks_unheld", blocks=sorted(staying), mine=None if span is None else str(span))
        if span is not None:
            await moves.ask(span, "these blocks have no holder").wait()
            before = frozenset()
