"""How long this node has known others: the only standing that nobody can claim for himself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nesa_node.core.ids import PeerId

_MAX_PEERS = 4096
_FORGOTTEN_AFTER_S = 600.0
_SWEEP_S = 1.0
"""Where there is no room, so often all are searched for those that are gone."""


@dataclass(slots=True)
class _Known:
    since: float
    until: float


class Acquaintance:
    """Since when a peer's records have been seen here without a longer break.

    Where no room is left newcomers are not noted: identities are free, and must not push out those
    who were here before. `clock` gives seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float], max_peers: int = _MAX_PEERS) -> None:
        self._clock = clock
        self._max_peers = max_peers
        self._known: dict[PeerId, _Known] = {}
        self._swept_at = -math.inf

    def seen(self, peer: PeerId, until: float) -> None:
        """A valid record of `peer` is there, which lasts until then."""
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
        """0 for a stranger, and for one who has not been here for ten minutes."""
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
