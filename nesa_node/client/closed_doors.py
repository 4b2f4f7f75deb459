"""Detection of nodes that announce free cache and still refuse sessions.

A record is some seconds old, so that a single refusal proves nothing. Refusals by a node that
already serves this client do not count: its quota per client may be used up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from nesa_node.core.ids import PeerId

RECORDS = 3
"""Number of records with free cache, each followed by a refusal, before a report."""
WITHIN_S = 600.0
"""Seconds after which a refusal no longer counts."""
_MAX_PEERS = 1024


class LinkLike(Protocol):
    """A session's link to a node."""

    closed: bool


class ClosedDoors:
    """Refusal counts by peer, shared by all sessions of a client.

    `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: OrderedDict[PeerId, dict[int, float]] = OrderedDict()
        self._links: dict[PeerId, WeakSet[LinkLike]] = {}

    def accepted(self, peer: PeerId, link: LinkLike) -> None:
        """Note that `peer` opened a session, which lasts until `link` is closed."""
        self._refused.pop(peer, None)
        self._links = {each: links for each, links in self._links.items() if _open(links)}
        self._links.setdefault(peer, WeakSet()).add(link)

    def refused(self, peer: PeerId, record: int) -> bool:
        """Note that `peer` refused although its record with sequence number `record` had room.

        Returns whether to report the peer: it has refused after `RECORDS` of its records within
        `WITHIN_S` and opened no session since. The count then starts again.
        """
        if _open(self._links.get(peer, WeakSet())):
            return False
        now = self._clock()
        seen = self._refused.pop(peer, {})
        seen = {number: at for number, at in seen.items() if now - at < WITHIN_S}
        seen[record] = now
        if len(seen) >= RECORDS:
            return True
        self._refused[peer] = seen
        if len(self._refused) > _MAX_PEERS:
            self._refused.popitem(last=False)
        return False


def _open(links: WeakSet[LinkLike]) -> bool:
    return any(not link.closed for link in links)
