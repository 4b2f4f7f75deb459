"""How many bytes per second go to a peer, by what it says of the messages that came."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from nesa_node.core.ids import PeerId

LEAST_BYTES = 64 * 1024
"""Of a message that says something about the rate. Smaller ones come in one piece."""
_REPORTS = 6
_SLOWER = 0.5
"""Two reports in a row of less than this of what was thought: the link is another now."""
_FRESH_S = 60.0
"""Links change: reports so much older than the newest do not count."""
PROBE_AGAIN_S = 300.0
"""A probe takes as long as what it is there to save: 0.2 s at 5 Mbit/s."""
_MAX_PEERS = 1024


class LinkSpeed:
    """The second fastest of the last reports: a receiver with other things to do takes longer.

    Now and then one comes to data that waits already, and takes next to no time. Only large
    messages count where there were any: the first of their bytes often come in a burst. That makes
    small ones look fast, so where even they are slow, whatever their size, large ones are history.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sent_bytes: Counter[str] | None = None,
        received_bytes: Counter[str] | None = None,
    ) -> None:
        self._clock = clock
        self.sent_bytes = Counter() if sent_bytes is None else sent_bytes
        """By codec, to all peers together."""
        self.received_bytes = Counter() if received_bytes is None else received_bytes
        """The same, from all peers."""
        self.is_local = False
        """The peer is on this machine: whatever takes long there, it is not the network."""
        self._reports: deque[tuple[float, int, float]] = deque(maxlen=_REPORTS)
        self._was_slower = False

    @property
    def rate_bytes_per_s(self) -> float | None:
        """None before the first report."""
        if self.is_local:
            return math.inf
        if not self._reports:
            return None
        since = self._reports[-1][0] - _FRESH_S
        fresh = [(nbytes, seconds) for at, nbytes, seconds in self._reports if at >= since]
        large = max(nbytes for nbytes, _ in fresh) / 2
        rates = sorted(nbytes / seconds for nbytes, seconds in fresh if nbytes >= large)
        return rates[-2] if len(rates) > 2 else rates[-1]

    @property
    def is_due(self) -> bool:
        """Whether too little is known of the link now to choose by."""
        if self.is_local:
            return False
        return not self._reports or self._clock() - self._reports[-1][0] > PROBE_AGAIN_S

    def note(self, nbytes: int, seconds: float) -> None:
        if nbytes <= 0 or seconds <= 0:
            return
        rate = self.rate_bytes_per_s
        is_slower = rate is not None and nbytes / seconds < _SLOWER * rate
        if is_slower and self._was_slower:
            while len(self._reports) > 1:
                self._reports.popleft()
            is_slower = False
        self._was_slower = is_slower
        self._reports.append((self._clock(), nbytes, seconds))


class LinkSpeeds:
    """One for each peer that was sent something lately, for all sessions of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._speeds: OrderedDict[PeerId, LinkSpeed] = OrderedDict()

    def rate_to(self, peer: PeerId) -> float:
        """Bytes/s; NaN where nothing was sent lately, or nothing that says so."""
        speed = self._speeds.get(peer)
        rate = None if speed is None else speed.rate_bytes_per_s
        return math.nan if rate is None else rate

    def to(self, peer: PeerId) -> LinkSpeed:
        speed = self._speeds.setdefault(peer, self._new())
        self._speeds.move_to_end(peer)
        if len(self._speeds) > _MAX_PEERS:
            self._speeds.popitem(last=False)
        return speed

    def _new(self) -> LinkSpeed:
        return LinkSpeed(self._clock, self.sent_bytes, self.received_bytes)
