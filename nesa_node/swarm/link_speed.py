"""How many bytes per second go to a peer, by what it says of the messages that came."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque

from nesa_node.core.ids import PeerId

LEAST_BYTES = 64 * 1024
"""Of a message that says something about the rate. Smaller ones come in one piece."""
_REPORTS = 6
_MAX_PEERS = 1024


class LinkSpeed:
    """The fastest of the last reports: a receiver with other things to do takes longer.

    Only large messages count where there were any: the first of their bytes often come in a burst.
    """

    def __init__(self, sent_bytes: Counter[str] | None = None) -> None:
        self.sent_bytes = Counter() if sent_bytes is None else sent_bytes
        """By codec, to all peers together."""
        self.is_local = False
        """The peer is on this machine: whatever takes long there, it is not the network."""
        self._reports: deque[tuple[int, float]] = deque(maxlen=_REPORTS)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """None before the first report."""
        if self.is_local:
            return math.inf
        if not self._reports:
            return None
        large = max(nbytes for nbytes, _ in self._reports) / 2
        return max(nbytes / seconds for nbytes, seconds in self._reports if nbytes >= large)

    def note(self, nbytes: int, seconds: float) -> None:
        if nbytes > 0 and seconds > 0:
            self._reports.append((nbytes, seconds))


class LinkSpeeds:
    """One for each peer that was sent something lately, for all sessions of this process."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self._speeds: OrderedDict[PeerId, LinkSpeed] = OrderedDict()

    def to(self, peer: PeerId) -> LinkSpeed:
        speed = self._speeds.setdefault(peer, LinkSpeed(self.sent_bytes))
        self._speeds.move_to_end(peer)
        if len(self._speeds) > _MAX_PEERS:
            self._speeds.popitem(last=False)
        return speed
