"""Nodes that announce room and let nobody in: when that is worth telling others.

A record is some seconds old, so that one refusal proves nothing. Nor do those of a node that serves
this client already: it may have had its share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from nesa_node.core.ids import PeerId

RECORDS = 3
"""Announcements of room after which it refused."""
WITHIN_S = 600.0
_MAX_PEERS = 1024


class LinkLike(Protocol):
    """A session's link to the node."""

    closed: bool


class ClosedDoors:
    """Shared by the sessions of a client. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: OrderedDict[PeerId, dict[int, float]] = OrderedDict()
        self._links: dict[PeerId, WeakSet[LinkLike]] = {}

    def accepted(self, peer: PeerId, link: LinkLike) -> None:
        """`peer` opened a session, which lasts until `link` is closed."""
        self._refused.pop(peer, None)
        self._links = {each: links for each, links in self._links.items() if _open(links)}
        self._links.setdefault(peer, WeakSet()).add(link)

    def refused(self, peer: PeerId, record: int) -> bool:
        """`peer` had no room, though its record of that number said so.

        Whether that should be told: it did the same after each of its last few records, and has
        opened nothing meanwhile. Then it begins anew.
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
