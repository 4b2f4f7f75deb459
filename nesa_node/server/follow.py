"""Follower of placements: requests the moves that this node accepts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.server.obedience import Obedience
from nesa_node.swarm.notice_board import NoticeBoard
from nesa_node.swarm.notices import Placement
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

DEFAULT_EVERY_S = 15.0
JITTER = (0.8, 1.2)


class WishLike(Protocol):
    async def wait(self) -> str: ...


class MovesLike(Protocol):
    """The part of `Moves` that is needed here."""

    def ask(self, span: Span, reason: str) -> WishLike: ...


async def follow(
    board: NoticeBoard,
    glance: Callable[[], Snapshot],
    look: Callable[[], Awaitable[Snapshot]],
    model_id: ModelId,
    obedience: Obedience,
    moves: MovesLike,
    *,
    every_s: float = DEFAULT_EVERY_S,
    rng: random.Random,
) -> None:
    """Check the placements about every `every_s` seconds, until cancelled.

    `glance` gives the cached snapshot without network traffic, `look` fetches one with links.
    """
    while True:
        await asyncio.sleep(every_s * rng.uniform(*JITTER))
        try:
            seen = glance()
            obedience.glance(seen)
            placements = obedience.due(await board.fetch(Placement, model_id), seen)
            if not placements:
                continue
            snapshot = await look()
            # Judging a large swarm's placement takes long: not on the event loop.
            found = await asyncio.to_thread(obedience.consider, placements, snapshot)
        except (SwarmError, OSError) as error:
            log.warning("placements_not_read", reason=str(error))
            continue
        except Exception:  # a bug: one bad placement must not stop this loop
            log.exception("placements_not_read")
            continue
        if found is None:
            continue
        placement, verdict = found
        assert verdict.span is not None
        why = f"placement {placement.name}: {verdict.reason}"
        answer = await moves.ask(verdict.span, why).wait()
        log.info(
            "placement_followed",
            placement=placement.name,
            span=str(verdict.span),
            reason=verdict.reason,
            answer=answer,
        )
