"""Detection of nodes that announce free cache and still refuse sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from nesa_node.core.ids import PeerId

MIN_REFUSED_RECORDS = 3
"""Number of records with free cache, each followed by a refusal, before a report."""
REFUSAL_WINDOW_S = 600.0
"""Seconds after which a refusal no longer counts."""
_MAX_TRACKED_PEERS = 1024


class ClosableLink(Protocol):
    """A session's link to a node."""

    @property
    def closed(self) -> bool: ...


class RefusalTracker:
    """Refusal counts by peer, shared by all sessions of a client. `clock` is monotonic seconds.

    A record is some seconds old, so that a single refusal proves nothing. Refusals by a node that
    already serves this client do not count: its quota per client may be used up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refused: OrderedDict[PeerId, dict[int, float]] = OrderedDict()
        self._links: dict[PeerId, WeakSet[ClosableLink]] = {}

    def record_accepted(self, peer: PeerId, link: ClosableLink) -> None:
        """Note that `peer` opened a session, which lasts until `link` is closed."""
        self._refused.pop(peer, None)
        self._links = {each: links for each, links in self._links.items() if _any_open(links)}
        self._links.setdefault(peer, WeakSet()).add(link)

    def record_refusal(self, peer: PeerId, record_seq: int) -> bool:
        """Note that `peer` refused although its record with sequence number `record_seq` had room.

        Returns whether to report the peer: it has refused after `MIN_REFUSED_RECORDS` of its
        records within `REFUSAL_WINDOW_S` and opened no session since. The count then starts again.
        """
        if _any_open(self._links.get(peer, WeakSet())):
            return False
        now = self._clock()
        seen = self._refused.pop(peer, {})
        seen = {number: at for number, at in seen.items() if now - at < REFUSAL_WINDOW_S}
        seen[record_seq] = now
        if len(seen) >= MIN_REFUSED_RECORDS:
            return True
        self._refused[peer] = seen
        if len(self._refused) > _MAX_TRACKED_PEERS:
            self._refused.popitem(last=False)
        return False


def _any_open(links: WeakSet[ClosableLink]) -> bool:
    return any(not link.closed for link in links)
