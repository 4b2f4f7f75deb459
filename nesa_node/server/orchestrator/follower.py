"""Follower of placements: requests the moves that this node accepts.

Snapshots with the nodes' claimed speeds limited to what was measured.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.routing.reputation import SpeedClaims
from nesa_node.server.orchestrator.placement_filter import PlacementFilter
from nesa_node.swarm.dht.notices import PlacementNotice
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

DEFAULT_FOLLOW_INTERVAL_S = 15.0
FOLLOW_JITTER = (0.8, 1.2)


class MoveRequestLike(Protocol):
    async def wait(self) -> str: ...


class MoveLimiterLike(Protocol):
    """The part of `MoveLimiter` that is needed here."""

    def request_move(self, span: Span, reason: str) -> MoveRequestLike: ...


async def follow_placements(
    board: NoticeStore,
    cached_snapshot: Callable[[], Snapshot],
    fetch_snapshot: Callable[[], Awaitable[Snapshot]],
    model_id: ModelId,
    placement_filter: PlacementFilter,
    move_limiter: MoveLimiterLike,
    *,
    every_s: float = DEFAULT_FOLLOW_INTERVAL_S,
    rng: random.Random,
) -> None:
    """Check the placements about every `every_s` seconds, until cancelled.

    `cached_snapshot` gives the cached snapshot without network traffic, `fetch_snapshot` fetches
    one with links.
    """
    while True:
        await asyncio.sleep(every_s * rng.uniform(*FOLLOW_JITTER))
        try:
            seen = cached_snapshot()
            placement_filter.remember_snapshot(seen)
            placements = placement_filter.select_due(
                await board.fetch(PlacementNotice, model_id), seen
            )
            if not placements:
                continue
            snapshot = await fetch_snapshot()
            # Judging a large swarm's placement takes long: not on the event loop.
            found = await asyncio.to_thread(placement_filter.first_accepted, placements, snapshot)
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
        answer = await move_limiter.request_move(verdict.span, why).wait()
        log.info(
            "placement_followed",
            placement=placement.name,
            span=str(verdict.span),
            reason=verdict.reason,
            answer=answer,
        )


class DoubtSource(Protocol):
    def speed_doubts(self, model_id: ModelId) -> Mapping[PeerId, float]: ...


class ClampedSpeeds:
    """Clamps claimed speeds by the measurements that clients report.

    Neither planners nor followers compute with other nodes. `claims` remembers reports as long as
    own measurements. Not thread-safe.
    """

    def __init__(self, directory: DoubtSource, claims: SpeedClaims) -> None:
        self._directory = directory
        self._claims = claims

    def clamp(self, snapshot: Snapshot) -> Snapshot:
        """`snapshot` with clamped speeds."""
        doubts = self._directory.speed_doubts(snapshot.model_id)
        everyone = (*snapshot.nodes, *snapshot.joining)
        for node in everyone:
            self._claims.record_reports(node, doubts.get(node.peer_id, 0.0))
        nodes, joining = (
            tuple(map(self._claims.clamp, each)) for each in (snapshot.nodes, snapshot.joining)
        )
        return replace(snapshot, nodes=nodes, joining=joining)
