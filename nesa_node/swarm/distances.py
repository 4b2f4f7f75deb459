"""Round-trip times from this node to its peers."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.metric_names import ROUND_TRIP
from nesa_node.swarm.link_speed import LinkSpeeds
from nesa_node.swarm.ping import ping
from nesa_node.swarm.transport import Transport
from nesa_node.topology.packed import MAX_MEASURED, Measured, peer_digest

_PINGS_KEPT = 5
_MAX_PEERS = 1024
_MAX_BACK_OFF_S = 1800.0
_MAX_TRIES = 16


class Distances:
    """Recent round-trip times of each peer, and the peers that did not answer their last ping.

    `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pings: OrderedDict[PeerId, deque[float]] = OrderedDict()
        self._measured_at: dict[PeerId, float] = {}
        self._failed: OrderedDict[PeerId, tuple[float, int]] = OrderedDict()
        """By peer: when it was pinged last, and consecutive failures."""
        self.round_trips_s = ROUND_TRIP.tally()
        self.unanswered = 0

    def note(self, peer: PeerId, rtt_ms: float) -> None:
        self.round_trips_s.add(rtt_ms / 1000)
        self._pings.setdefault(peer, deque(maxlen=_PINGS_KEPT)).append(rtt_ms)
        self._pings.move_to_end(peer)
        self._measured_at[peer] = self._clock()
        self._failed.pop(peer, None)
        if len(self._pings) > _MAX_PEERS:
            forgotten, _ = self._pings.popitem(last=False)
            del self._measured_at[forgotten]

    def forget(self, peer: PeerId) -> None:
        """Count an unanswered ping, and forget the round trips of `peer`."""
        self._pings.pop(peer, None)
        self._measured_at.pop(peer, None)
        self.unanswered += 1
        _, tries = self._failed.pop(peer, (0.0, 0))
        self._failed[peer] = self._clock(), min(tries + 1, _MAX_TRIES)
        if len(self._failed) > _MAX_PEERS:
            self._failed.popitem(last=False)

    def rtt_ms(self, peer: PeerId) -> float:
        """Median round trip of the last pings in ms; NaN if none was answered."""
        pings = self._pings.get(peer)
        return statistics.median(pings) if pings else math.nan

    def age_s(self, peer: PeerId) -> float:
        """Seconds since the last ping, answered or not; inf if there was none."""
        at = self._measured_at.get(peer)
        if at is None and peer in self._failed:
            at, _ = self._failed[peer]
        return math.inf if at is None else self._clock() - at

    def is_due(self, peer: PeerId, refresh_s: float) -> bool:
        """Whether to ping `peer` now; answering peers are pinged every `refresh_s`.

        After a failure the pause is `refresh_s`, and doubles with each further one up to half an
        hour (or `refresh_s`, if that is more).
        """
        _, tries = self._failed.get(peer, (0.0, 1))
        back_off_s = min(refresh_s * 2.0 ** (tries - 1), max(_MAX_BACK_OFF_S, refresh_s))
        return self.age_s(peer) >= back_off_s

    def measured(self, speeds: LinkSpeeds) -> tuple[Measured, ...]:
        """Links for this node's record: half are the nearest, half the freshest of the remaining.

        Peers with equal digests are left out, since readers could not tell them apart.
        """
        digests = Counter(map(peer_digest, self._pings))
        unique = [peer for peer in self._pings if digests[peer_digest(peer)] == 1]
        known = sorted(unique, key=lambda peer: (self.rtt_ms(peer), peer))
        near, far = known[: MAX_MEASURED // 2], known[MAX_MEASURED // 2 :]
        fresh = sorted(far, key=self.age_s)[: MAX_MEASURED - len(near)]
        return tuple(
            Measured(peer_digest(peer), self.rtt_ms(peer), speeds.rate_to(peer), self.age_s(peer))
            for peer in (*near, *fresh)
        )

    async def measure(
        self,
        transport: Transport,
        peers: Mapping[PeerId, Sequence[str]],
        *,
        timeout_s: float = 5.0,
    ) -> None:
        """Ping `peers`, given with their addresses, concurrently.

        The round trip of a peer that does not answer becomes NaN.
        """

        async def one(peer: PeerId, addresses: Sequence[str]) -> None:
            try:
                self.note(peer, await ping(transport, peer, addresses, timeout_s=timeout_s))
            except PeerUnreachableError:
                self.forget(peer)

        async with asyncio.TaskGroup() as group:
            for peer, addresses in peers.items():
                group.create_task(one(peer, addresses))


def next_to_ping(
    distances: Distances, peers: Sequence[PeerId], rng: random.Random, *, refresh_s: float
) -> PeerId | None:
    """Choose the peer to ping next, or None if all were pinged within `refresh_s`.

    In a small swarm all peers take turns. In a large one half of the pings go to the `MAX_MEASURED`
    nearest, which matter most to routing, and half to random unknown ones, to find nearer peers.
    """
    due = [peer for peer in peers if distances.is_due(peer, refresh_s)]
    if not due:
        return None
    known = [peer for peer in due if not math.isnan(distances.rtt_ms(peer))]
    unknown = [peer for peer in due if math.isnan(distances.rtt_ms(peer))]
    if unknown and (len(peers) <= MAX_MEASURED or not known or rng.random() < 0.5):
        return rng.choice(unknown)
    near = sorted(known, key=lambda peer: (distances.rtt_ms(peer), peer))[:MAX_MEASURED]
    return max(near, key=distances.age_s)
