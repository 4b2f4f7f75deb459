"""Reputation of peers: how their runs have ended as seen here, and what other nodes report.

Publication of peer failures seen by this node, so that other clients avoid these peers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.routing.reputation import (
    Accusation,
    aggregate_blame,
    clamp_uptime_s,
    corroborated_weight,
    long_term_standing,
    reliability,
    reporter_standing,
)
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.dht.sealing import (
    MAX_REPORTED_PEERS,
    FailureKind,
    FailureReport,
    ReportedFailure,
)
from nesa_node.swarm.notice_store import NoticeStore

log = get_logger(__name__)

_MAX_HISTORIES = 4096
_MIN_UPTIME_DROP_S = 5.0
"""Decrease of the announced uptime from which on it counts as a restart."""


@dataclass(frozen=True, slots=True)
class ExitCounts:
    """Number of a node's failures (ends without notice) and drains (planned ends)."""

    failures: int = 0
    drains: int = 0


class ExitHistories:
    """Counts of failures and drains by peer, from the records that this node reads.

    At most 4,096 peers. A new one evicts a peer with the fewest failures, and of these the one
    unchanged for longest, in constant time since many records may expire at once. Identities are
    free: an attacker's ones that fail once each do not evict peers that failed more often.
    """

    def __init__(self) -> None:
        # Peers without a failure, with one, and with more; the longest unchanged first.
        self._by_failures = tuple(OrderedDict[PeerId, ExitCounts]() for _ in range(3))

    def record_replacement(self, before: NodeRecord, after: NodeRecord) -> None:
        """Count a drain or a restart that shows in a peer's newer record `after`."""
        if before.state == "serving" and after.state in ("draining", "withdrawn"):
            self._add(before, drains=1)
        elif before.state == "serving" and after.uptime_s < before.uptime_s - _MIN_UPTIME_DROP_S:
            self._add(before, failures=1)

    def record_expiry(self, record: NodeRecord) -> None:
        """Count a failure if `record`, which expired without a successor, was serving."""
        if record.state == "serving":
            self._add(record, failures=1)

    def counts(self, peer: PeerId) -> ExitCounts:
        return next((kept[peer] for kept in self._by_failures if peer in kept), ExitCounts())

    def _add(self, record: NodeRecord, *, failures: int = 0, drains: int = 0) -> None:
        peer = record.signer
        before = self.counts(peer)
        for kept in self._by_failures:
            kept.pop(peer, None)
        if sum(map(len, self._by_failures)) >= _MAX_HISTORIES:
            next(kept for kept in self._by_failures if kept).popitem(last=False)
        ends = ExitCounts(before.failures + failures, before.drains + drains)
        self._by_failures[min(ends.failures, 2)][peer] = ends


class ReputationView:
    """Blame, doubts and reliability of peers; reports signed by this node are left out."""

    def __init__(
        self, notices: NoticeStore, own_peer_id: PeerId, *, clock: Callable[[], float]
    ) -> None:
        self.histories = ExitHistories()
        self._notices = notices
        self._own = own_peer_id
        self._clock = clock

    def blames(self, model_id: ModelId, records: Iterable[NodeRecord]) -> Mapping[PeerId, float]:
        """Blame of each reported peer; only reporters with a record in `records` have weight."""
        known = {record.signer: record for record in records}
        now = self._clock()
        accusations = [
            Accusation(report.signer, PeerId(failure.peer), failure.kind, now - failure.at)
            for report in self._notices.known_notices(FailureReport, model_id)
            if report.signer != self._own
            for failure in report.failures
        ]
        if not accusations:
            return {}
        reporters = {accusation.reporter for accusation in accusations}
        word = {
            peer: self._report_weight(known[peer], reporter_standing)
            for peer in reporters
            if peer in known
        }
        return aggregate_blame(accusations, lambda peer: word.get(peer, 0.0))

    def speed_doubts(
        self, model_id: ModelId, records: Iterable[NodeRecord]
    ) -> Mapping[PeerId, float]:
        """Peers reported as slower than they announce, weighted by their reporters' standing.

        `corroborated_weight` combines the weights of several reporters, which must be long known
        here.
        """
        known = {record.signer: record for record in records}
        words: defaultdict[PeerId, list[float]] = defaultdict(list)
        for report in self._notices.known_notices(FailureReport, model_id):
            if report.signer not in known or report.signer == self._own:
                continue
            standing = self._report_weight(known[report.signer], long_term_standing)
            word = standing / len(report.failures)
            for failure in report.failures:
                if failure.kind == "slow":
                    words[PeerId(failure.peer)].append(word)
        return {peer: corroborated_weight(each) for peer, each in words.items()}

    def reliability(self, record: NodeRecord, blame: float) -> float:
        peer = record.signer
        ends = self.histories.counts(peer)
        known_s = self._notices.peer_ages.known_s(peer)
        uptime_s = clamp_uptime_s(record.uptime_s, known_s)
        return reliability(uptime_s, ends.failures, ends.drains, blame)

    def _report_weight(self, record: NodeRecord, weigh: Callable[[float, float], float]) -> float:
        if record.state != "serving":
            return 0.0
        known_s = self._notices.peer_ages.known_s(record.signer)
        return weigh(known_s, self.reliability(record, 0.0))


REPORT_TTL_S = 240.0
_REPORT_INTERVAL_S = FailureReport.bounds.min_interval_s + 0.5
_MAX_REPORTED_MODELS = 16
_MAX_FAILURE_COUNT = 1000


class FailureReporter:
    """Collects failures and, in `run`, publishes them: at once, then at most every ten seconds.

    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        notices: NoticeStore,
        own_peer_id: PeerId,
        *,
        clock: Callable[[], float],
        interval_s: float = _REPORT_INTERVAL_S,
    ) -> None:
        self._notices = notices
        self._own_peer_id = own_peer_id
        self._clock = clock
        self._interval_s = interval_s
        self._failures = LruTable[ModelId, LruTable[PeerId, ReportedFailure]](_MAX_REPORTED_MODELS)
        self._unpublished: set[ModelId] = set()
        self._has_unpublished = asyncio.Event()

    def record_failure(self, model_id: ModelId, peer: PeerId, kind: FailureKind) -> None:
        """Record a failure of `peer`; the `MAX_REPORTED_PEERS` peers that failed last are
        reported."""
        if peer == self._own_peer_id:
            return
        failures = self._failures.get(model_id, LruTable(MAX_REPORTED_PEERS))
        self._failures.put(model_id, failures)
        before = failures.get(peer)
        count = 1
        if before is not None and before.kind == kind:
            count = min(before.count + 1, _MAX_FAILURE_COUNT)
        failure = ReportedFailure(peer=peer, kind=kind, count=count, at=self._clock())
        failures.put(peer, failure)
        self._unpublished.add(model_id)
        self._has_unpublished.set()

    async def run(self) -> None:
        """Publish new failures until cancelled; errors of publishing are logged."""
        while True:
            await self._has_unpublished.wait()
            self._has_unpublished.clear()
            for model_id in tuple(self._unpublished):
                self._unpublished.discard(model_id)
                try:
                    await self._publish(model_id)
                except (NesaError, OSError, ValueError) as error:
                    log.info("failures_not_reported", reason=str(error))
            await asyncio.sleep(self._interval_s)

    async def _publish(self, model_id: ModelId) -> None:
        since = self._clock() - REPORT_TTL_S
        failures: Mapping[PeerId, ReportedFailure] = self._failures.get(model_id, {})
        fresh = tuple(failure for failure in failures.values() if failure.at > since)
        if fresh:
            await self._notices.publish(FailureReport, model_id, ttl_s=REPORT_TTL_S, failures=fresh)
            log.debug("failures_reported", model=model_id, peers=len(fresh))
