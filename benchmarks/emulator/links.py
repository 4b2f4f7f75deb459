"""What a link does to packets: when, if ever, one that is sent now arrives.

No clock and no network in here: times are seconds that the caller passes in, never decreasing.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

LEAST_QUEUE_BYTES = 262_144
"""Four of the largest bursts that a kernel hands over at once."""
_QUEUE_S = 0.1
_UNLIMITED = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two sites. As it is made by default it delivers at once."""

    latency_ms: float = 0.0
    """One way: half of what such a link and one alike back add to a round trip."""
    jitter_ms: float = 0.0
    """Each packet takes up to this much longer, equally likely; none overtakes another, so that a
    packet which follows a late one is as late."""
    bandwidth_mbit_per_s: float | None = None
    """Counted in IP packets, headers included; None: no limit."""
    loss: float = 0.0
    """The probability that a packet which was sent does not arrive. It has taken its time on the
    line all the same."""
    queue_bytes: int | None = None
    """What waits at most for the line; more is dropped. None: what the line sends in 100 ms or in
    the time of a round trip, whichever is more, and at least 256 KiB."""
    up: bool = True
    """Nothing that is sent while it is down arrives."""

    def __post_init__(self) -> None:
        if min(self.latency_ms, self.jitter_ms) < 0 or not 0 <= self.loss <= 1:
            raise ValueError(f"latency and jitter are at least 0, loss is within 0 and 1: {self}")
        if self.bandwidth_mbit_per_s is not None and self.bandwidth_mbit_per_s <= 0:
            raise ValueError(f"a bandwidth is above 0; use up=False for a dead link: {self}")

    @property
    def bytes_per_s(self) -> float:
        """Infinity where there is no limit."""
        limit = self.bandwidth_mbit_per_s
        return _UNLIMITED if limit is None else limit * 125_000

    @property
    def queue_limit_bytes(self) -> float:
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(self.bytes_per_s * max(_QUEUE_S, self.latency_ms / 500), LEAST_QUEUE_BYTES)


class Line:
    """The state of a link: what waits for it and what is under way. Counts what it was given."""

    def __init__(self, link: Link, rng: Random) -> None:
        self.link = link
        """May be replaced at any time: what has been sent before still arrives when it would have,
        and whatever is sent later arrives after it."""
        self.packets = 0
        self.bytes = 0
        """Of the packets that arrive or have arrived, headers included."""
        self.overflowed = 0
        self.lost = 0
        """Packets that were dropped by chance or because the link was down."""
        self._rng = rng
        self._free_at = 0.0
        self._last_due = 0.0

    def send(self, now_s: float, size_bytes: int, packets: int = 1) -> float | None:
        """When these `packets` of together `size_bytes` arrive, or None: never.

        They share a fate, and arrive together once the last of them has.
        """
        link = self.link
        if not link.up:
            self.lost += packets
            return None
        rate = link.bytes_per_s
        waiting_s = self._free_at - now_s
        # What is longer than the queue still fits an idle line.
        queued = waiting_s > 0 and rate != _UNLIMITED
        if queued and waiting_s * rate + size_bytes > link.queue_limit_bytes:
            self.overflowed += packets
            return None
        self._free_at = max(now_s, self._free_at) + size_bytes / rate
        if link.loss and self._rng.random() < link.loss:
            self.lost += packets
            return None
        due = self._free_at + link.latency_ms / 1000
        if link.jitter_ms:
            due += self._rng.random() * link.jitter_ms / 1000
        self._last_due = due = max(due, self._last_due)
        self.packets += packets
        self.bytes += size_bytes
        return due
