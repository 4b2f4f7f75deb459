"""Memory for the values of requests that a node has received and not answered yet."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

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
        self._waiting: deque[tuple[PeerId, int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    async def acquire(self, peer: PeerId, nbytes: int) -> None:
        """Wait for room. `nbytes` must be at most a peer's share."""
        assert nbytes <= self.peer_bytes
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = peer, nbytes, granted
        self._waiting.append(waiting)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self.release(peer, nbytes)
            raise

    def release(self, peer: PeerId, nbytes: int) -> None:
        self._held[peer] -= nbytes
        if not self._held[peer]:
            del self._held[peer]
        self._grant()

    def _grant(self) -> None:
        blocked: set[PeerId] = set()
        for waiting in list(self._waiting):
            peer, nbytes, granted = waiting
            if peer in blocked or not self._has_room(peer, nbytes):
                blocked.add(peer)
            else:
                self._held[peer] += nbytes
                self._waiting.remove(waiting)
                if not granted.done():
                    granted.set_result(None)

    def _has_room(self, peer: PeerId, nbytes: int) -> bool:
        return (
            self.held_bytes + nbytes <= self._total_bytes
            and self._held[peer] + nbytes <= self.peer_bytes
        )
