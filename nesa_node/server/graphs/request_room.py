"""Memory for the values of requests that a node has received and not answered yet."""

from __future__ import annotations

import asyncio
from collections import Counter

from nesa_node.core.ids import PeerId

PEER_SHARE = 2
"""One peer may have the room divided by this: identities are free, so that this only keeps one
client from excluding the next by accident."""


class RequestRoom:
    """Bytes that wait for room, first in first out for each peer."""

    def __init__(self, total_bytes: int) -> None:
        self.peer_bytes = total_bytes // PEER_SHARE
        self._total_bytes = total_bytes
        self._held: Counter[PeerId] = Counter()
        self._changed = asyncio.Condition()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    async def acquire(self, peer: PeerId, nbytes: int) -> None:
        """Wait for room. `nbytes` must be at most a peer's share."""
        assert nbytes <= self.peer_bytes
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(peer, nbytes))
            self._held[peer] += nbytes

    async def release(self, peer: PeerId, nbytes: int) -> None:
        async with self._changed:
            self._held[peer] -= nbytes
            if not self._held[peer]:
                del self._held[peer]
            self._changed.notify_all()

    def _has_room(self, peer: PeerId, nbytes: int) -> bool:
        return (
            self.held_bytes + nbytes <= self._total_bytes
            and self._held[peer] + nbytes <= self.peer_bytes
        )
