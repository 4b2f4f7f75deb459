"""Throughput of links, from the arrival times that receivers report."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from nesa_node.core.ids import PeerId

MIN_SAMPLE_BYTES = 64 * 1024
"""Minimum payload of a message that is timed. Smaller ones arrive in one piece."""
_MAX_REPORTS = 6
_SLOWDOWN_FRACTION = 0.5
"""Two reports in a row below this fraction of the estimate reset it: the link has changed."""
_MAX_REPORT_AGE_S = 60.0
"""Reports older than the newest by more than this are ignored."""
PROBE_INTERVAL_S = 300.0
"""Time without reports after which a link is probed: a probe takes 0.2 s at 5 Mbit/s, as much as
compression may save."""
_MAX_LINKS = 1024


class LinkSpeed:
    """Throughput of one link: the second fastest of the last reports.

    A busy receiver reports too low a rate; a receiver that finds the data already buffered reports
    far too high a one. Small messages look fast, since the first bytes often arrive in a burst, so
    only the larger ones count. Two slow reports in a row, of whatever size, discard all older ones.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sent_bytes: Counter[str] | None = None,
        received_bytes: Counter[str] | None = None,
    ) -> None:
        self._clock = clock
        self.sent_bytes = Counter() if sent_bytes is None else sent_bytes
        """Payload bytes by codec, to all peers together."""
        self.received_bytes = Counter() if received_bytes is None else received_bytes
        """Payload bytes by codec, from all peers together."""
        self.is_local = False
        """The peer is on this machine, so that the network limits no rate."""
        self._reports: deque[tuple[float, int, float]] = deque(maxlen=_MAX_REPORTS)
        self._was_slower = False

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Estimated throughput; None before the first report, inf for a local peer."""
        if self.is_local:
            return math.inf
        if not self._reports:
            return None
        since = self._reports[-1][0] - _MAX_REPORT_AGE_S
        fresh = [(nbytes, seconds) for at, nbytes, seconds in self._reports if at >= since]
        large = max(nbytes for nbytes, _ in fresh) / 2
        rates = sorted(nbytes / seconds for nbytes, seconds in fresh if nbytes >= large)
        return rates[-2] if len(rates) > 2 else rates[-1]

    @property
    def needs_probe(self) -> bool:
        """Whether the last report is missing or older than `PROBE_INTERVAL_S`."""
        if self.is_local:
            return False
        return not self._reports or self._clock() - self._reports[-1][0] > PROBE_INTERVAL_S

    def record_report(self, nbytes: int, seconds: float) -> None:
        if nbytes <= 0 or seconds <= 0:
            return
        rate = self.rate_bytes_per_s
        is_slower = rate is not None and nbytes / seconds < _SLOWDOWN_FRACTION * rate
        if is_slower and self._was_slower:
            while len(self._reports) > 1:
                self._reports.popleft()
            is_slower = False
        self._was_slower = is_slower
        self._reports.append((self._clock(), nbytes, seconds))


class LinkSpeeds:
    """`LinkSpeed` of each peer used recently, shared by all sessions of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._speeds: OrderedDict[PeerId, LinkSpeed] = OrderedDict()

    def rate_bytes_per_s_to(self, peer: PeerId) -> float:
        """Throughput to `peer` in bytes per second; NaN if unknown."""
        speed = self._speeds.get(peer)
        rate = None if speed is None else speed.rate_bytes_per_s
        return math.nan if rate is None else rate

    def link_to(self, peer: PeerId) -> LinkSpeed:
        speed = self._speeds.setdefault(peer, self._new())
        self._speeds.move_to_end(peer)
        if len(self._speeds) > _MAX_LINKS:
            self._speeds.popitem(last=False)
        return speed

    def _new(self) -> LinkSpeed:
        return LinkSpeed(self._clock, self.sent_bytes, self.received_bytes)
