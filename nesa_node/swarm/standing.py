"""How long this node has known each peer: a measure of trust that a peer cannot forge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nesa_node.core.ids import PeerId

_MAX_PEERS = 4096
_FORGOTTEN_AFTER_S = 600.0
_SWEEP_S = 1.0
"""Minimum time between sweeps for expired peers in a full table."""


@dataclass(slots=True)
class _Known:
    since: float
    until: float


class Acquaintance:
    """Since when each peer's records have been seen, without a gap of `_FORGOTTEN_AFTER_S`.

    A full table ignores new peers: identities are free, and must not evict peers known before.
    `clock` gives seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float], max_peers: int = _MAX_PEERS) -> None:
        self._clock = clock
        self._max_peers = max_peers
        self._known: dict[PeerId, _Known] = {}
        self._swept_at = -math.inf

    def seen(self, peer: PeerId, until: float) -> None:
        """Note a valid record of `peer` that expires at `until`."""
        now = self._clock()
        known = self._known.get(peer)
        if known is not None and known.until + _FORGOTTEN_AFTER_S > now:
            known.until = max(known.until, until)
            return
        if known is None and len(self._known) >= self._max_peers:
            self._forget(now)
            if len(self._known) >= self._max_peers:
                return
        self._known[peer] = _Known(now, until)

    def known_s(self, peer: PeerId) -> float:
        """Seconds since `peer` is known; 0 if unknown, or without records for ten minutes."""
        known = self._known.get(peer)
        now = self._clock()
        if known is None or known.until + _FORGOTTEN_AFTER_S <= now:
            return 0.0
        return max(now - known.since, 0.0)

    def _forget(self, now: float) -> None:
        if abs(now - self._swept_at) < _SWEEP_S:
            return
        self._swept_at = now
        gone = [peer for peer, known in self._known.items() if known.until <= now]
        for peer in gone:
            del self._known[peer]
