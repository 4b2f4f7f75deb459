"""Ping protocol: measures the round-trip time to a peer.

Round-trip times from this node to its peers.

Throughput of links, from the arrival times that receivers report.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.lru_table import LruTable
from nesa_node.core.metrics import HOP_RTT
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.swarm.p2p.transport import Transport
from nesa_node.topology.links.matrix import MAX_LINKS_PER_RECORD, MeasuredLink, peer_digest

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
        self._speeds: LruTable[PeerId, LinkSpeed] = LruTable(_MAX_LINKS)

    def rate_bytes_per_s_to(self, peer: PeerId) -> float:
        """Throughput to `peer` in bytes per second; NaN if unknown."""
        speed = self._speeds.get(peer)
        rate = None if speed is None else speed.rate_bytes_per_s
        return math.nan if rate is None else rate

    def link_to(self, peer: PeerId) -> LinkSpeed:
        speed = self._speeds.get(peer)
        if speed is None:
            speed = LinkSpeed(self._clock, self.sent_bytes, self.received_bytes)
        self._speeds.put(peer, speed)
        return speed


PING_PROTOCOL = "/nesa/ping/1"
PING_BYTES = 8
NUM_PINGS = 3
"""Pings per measurement: the first one includes libp2p's protocol negotiation."""
_MAX_PINGS_PER_STREAM = 16
_IDLE_TIMEOUT_S = 10.0


async def answer_pings(peer: PeerId, reader: Pipe, writer: Pipe) -> None:
    """Stream handler that echoes up to `_MAX_PINGS_PER_STREAM` pings, each within
    `_IDLE_TIMEOUT_S`."""
    for _ in range(_MAX_PINGS_PER_STREAM):
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                writer.write(await reader.readexactly(PING_BYTES))
                await writer.drain()
        except TimeoutError:
            return


async def ping(
    transport: Transport,
    peer: PeerId,
    addresses: Sequence[str] = (),
    *,
    timeout_s: float = 5.0,
    pings: int = NUM_PINGS,
) -> float:
    """Measure the shortest of `pings` round trips to `peer`, in ms.

    Disturbances only lengthen a round trip, so the shortest is closest to the path's latency.
    `timeout_s` bounds dialling and all pings together. Raises `PeerUnreachableError` if the peer
    does not answer, or answers with other bytes.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    pipe, _ = await transport.open_stream(peer, PING_PROTOCOL, addresses, timeout_s)
    try:
        async with asyncio.timeout_at(deadline):
            return min([await _round_trip_ms(pipe, number) for number in range(pings)])
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        raise PeerUnreachableError(f"{peer} does not answer pings: {error}") from error
    finally:
        pipe.close()


async def _round_trip_ms(pipe: Pipe, number: int) -> float:
    sent = number.to_bytes(PING_BYTES, "little")
    started = time.perf_counter()
    pipe.write(sent)
    if await pipe.readexactly(PING_BYTES) != sent:
        raise ConnectionError("something else came back")
    return (time.perf_counter() - started) * 1000


_PINGS_PER_PEER = 5
_MAX_PEERS = 1024
_MAX_BACKOFF_S = 1800.0
_MAX_FAILURES = 16


class RttTable:
    """Recent round-trip times of each peer, and the peers that did not answer their last ping.

    `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pings: LruTable[PeerId, tuple[deque[float], float]] = LruTable(_MAX_PEERS)
        """By peer: last round trips in ms, and when it answered last."""
        self._failed: LruTable[PeerId, tuple[float, int]] = LruTable(_MAX_PEERS)
        """By peer: when it was pinged last, and consecutive failures."""
        self.round_trips_s = HOP_RTT.new_histogram()
        self.num_unanswered = 0

    def record_ping(self, peer: PeerId, rtt_ms: float) -> None:
        self.round_trips_s.observe(rtt_ms / 1000)
        pings, _ = self._pings.get(peer, (deque[float](maxlen=_PINGS_PER_PEER), 0.0))
        pings.append(rtt_ms)
        self._pings.put(peer, (pings, self._clock()))
        self._failed.pop(peer, None)

    def record_failure(self, peer: PeerId) -> None:
        """Count an unanswered ping, and forget the round trips of `peer`."""
        self._pings.pop(peer, None)
        self.num_unanswered += 1
        _, tries = self._failed.get(peer, (0.0, 0))
        self._failed.put(peer, (self._clock(), min(tries + 1, _MAX_FAILURES)))

    def rtt_ms(self, peer: PeerId) -> float:
        """Median round trip of the last pings in ms; NaN if none was answered."""
        known = self._pings.get(peer)
        return math.nan if known is None else statistics.median(known[0])

    def age_s(self, peer: PeerId) -> float:
        """Seconds since the last ping, answered or not; inf if there was none."""
        if peer in self._pings:
            _, at = self._pings[peer]
        else:
            at, _ = self._failed.get(peer, (-math.inf, 0))
        return self._clock() - at

    def is_due(self, peer: PeerId, refresh_s: float) -> bool:
        """Whether to ping `peer` now; answering peers are pinged every `refresh_s`.

        After a failure the pause is `refresh_s`, and doubles with each further one up to half an
        hour (or `refresh_s`, if that is more).
        """
        _, tries = self._failed.get(peer, (0.0, 1))
        back_off_s = min(refresh_s * 2.0 ** (tries - 1), max(_MAX_BACKOFF_S, refresh_s))
        return self.age_s(peer) >= back_off_s

    def nearest_links(self, speeds: LinkSpeeds) -> tuple[MeasuredLink, ...]:
        """Links for this node's record: half are the nearest, half the freshest of the remaining.

        Peers with equal digests are left out, since readers could not tell them apart.
        """
        digests = Counter(map(peer_digest, self._pings))
        unique = [peer for peer in self._pings if digests[peer_digest(peer)] == 1]
        known = sorted(unique, key=lambda peer: (self.rtt_ms(peer), peer))
        near, far = known[: MAX_LINKS_PER_RECORD // 2], known[MAX_LINKS_PER_RECORD // 2 :]
        fresh = sorted(far, key=self.age_s)[: MAX_LINKS_PER_RECORD - len(near)]
        return tuple(
            MeasuredLink(
                peer_digest(peer),
                self.rtt_ms(peer),
                speeds.rate_bytes_per_s_to(peer),
                self.age_s(peer),
            )
            for peer in (*near, *fresh)
        )

    async def ping_all(
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
                self.record_ping(peer, await ping(transport, peer, addresses, timeout_s=timeout_s))
            except PeerUnreachableError:
                self.record_failure(peer)

        async with asyncio.TaskGroup() as group:
            for peer, addresses in peers.items():
                group.create_task(one(peer, addresses))


def choose_ping_target(
    rtts: RttTable, peers: Sequence[PeerId], rng: random.Random, *, refresh_s: float
) -> PeerId | None:
    """Choose the peer to ping next, or None if all were pinged within `refresh_s`.

    In a small swarm all peers take turns. In a large one half of the pings go to the
    `MAX_LINKS_PER_RECORD` nearest, which matter most to routing, and half to random unknown ones,
    to find nearer peers.
    """
    due = [peer for peer in peers if rtts.is_due(peer, refresh_s)]
    if not due:
        return None
    known = [peer for peer in due if not math.isnan(rtts.rtt_ms(peer))]
    unknown = [peer for peer in due if math.isnan(rtts.rtt_ms(peer))]
    if unknown and (len(peers) <= MAX_LINKS_PER_RECORD or not known or rng.random() < 0.5):
        return rng.choice(unknown)
    near = sorted(known, key=lambda peer: (rtts.rtt_ms(peer), peer))[:MAX_LINKS_PER_RECORD]
    return max(near, key=rtts.age_s)
