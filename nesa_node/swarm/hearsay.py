"""Reputation of peers: how their runs have ended as seen here, and what other nodes report."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.routing.reputation import (
    Accusation,
    believed_uptime_s,
    blames,
    corroborated,
    long_standing,
    reliability,
    standing,
)
from nesa_node.swarm.notice_board import NoticeBoard
from nesa_node.swarm.notices import Report
from nesa_node.swarm.records import NodeRecord

_MAX_PEERS = 4096
_RESTART_S = 5.0
"""Decrease of the announced uptime from which on it counts as a restart."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Number of a node's failures (ends without notice) and drains (planned ends)."""

    failures: int = 0
    drains: int = 0


class Histories:
    """Counts of failures and drains by peer, from the records that this node reads.

    At most 4,096 peers. A new one evicts a peer with the fewest failures, and of these the one
    unchanged for longest, in constant time since many records may expire at once. Identities are
    free: an attacker's ones that fail once each do not evict peers that failed more often.
    """

    def __init__(self) -> None:
        # Peers without a failure, with one, and with more; the longest unchanged first.
        self._by_failures = tuple(OrderedDict[PeerId, Ends]() for _ in range(3))

    def replaced(self, before: NodeRecord, after: NodeRecord) -> None:
        """Count a drain or a restart that shows in a peer's newer record `after`."""
        if before.state == "serving" and after.state in ("draining", "withdrawn"):
            self._note(before, drains=1)
        elif before.state == "serving" and after.uptime_s < before.uptime_s - _RESTART_S:
            self._note(before, failures=1)

    def expired(self, record: NodeRecord) -> None:
        """Count a failure if `record`, which expired without a successor, was serving."""
        if record.state == "serving":
            self._note(record, failures=1)

    def of(self, peer: PeerId) -> Ends:
        return next((kept[peer] for kept in self._by_failures if peer in kept), Ends())

    def _note(self, record: NodeRecord, *, failures: int = 0, drains: int = 0) -> None:
        peer = PeerId(record.peer_id)
        before = self.of(peer)
        for kept in self._by_failures:
            kept.pop(peer, None)
        if sum(map(len, self._by_failures)) >= _MAX_PEERS:
            next(kept for kept in self._by_failures if kept).popitem(last=False)
        ends = Ends(before.failures + failures, before.drains + drains)
        self._by_failures[min(ends.failures, 2)][peer] = ends


class Hearsay:
    """Blame, doubts and reliability of peers; reports signed by `own`, this node, are left out."""

    def __init__(self, board: NoticeBoard, own: PeerId, *, clock: Callable[[], float]) -> None:
        self.histories = Histories()
        self._board = board
        self._own = own
        self._clock = clock

    def blames(self, model_id: ModelId, records: Iterable[NodeRecord]) -> Mapping[PeerId, float]:
        """Blame of each reported peer; only reporters with a record in `records` have weight."""
        known = {PeerId(record.peer_id): record for record in records}
        now = self._clock()
        accusations = [
            Accusation(report.signer, PeerId(failure.peer), failure.kind, now - failure.at)
            for report in self._board.known(Report, model_id)
            if report.signer != self._own
            for failure in report.failures
        ]
        if not accusations:
            return {}
        reporters = {accusation.reporter for accusation in accusations}
        word = {peer: self._standing(known[peer]) for peer in reporters if peer in known}
        return blames(accusations, lambda peer: word.get(peer, 0.0))

    def doubts(self, model_id: ModelId, records: Iterable[NodeRecord]) -> Mapping[PeerId, float]:
        """Peers reported as slower than they announce, weighted by their reporters' standing.

        `corroborated` combines the weights of several reporters, which must be long known here.
        """
        known = {PeerId(record.peer_id): record for record in records}
        words: defaultdict[PeerId, list[float]] = defaultdict(list)
        for report in self._board.known(Report, model_id):
            if report.signer not in known or report.signer == self._own:
                continue
            word = self._long_standing(known[report.signer]) / len(report.failures)
            for failure in report.failures:
                if failure.kind == "slow":
                    words[PeerId(failure.peer)].append(word)
        return {peer: corroborated(each) for peer, each in words.items()}

    def reliability(self, record: NodeRecord, blame: float) -> float:
        peer = PeerId(record.peer_id)
        ends = self.histories.of(peer)
        known_s = self._board.acquaintance.known_s(peer)
        uptime_s = believed_uptime_s(record.uptime_s, known_s)
        return reliability(uptime_s, ends.failures, ends.drains, blame)

    def _standing(self, record: NodeRecord) -> float:
        return self._word(record, standing)

    def _long_standing(self, record: NodeRecord) -> float:
        return self._word(record, long_standing)

    def _word(self, record: NodeRecord, weigh: Callable[[float, float], float]) -> float:
        if record.state != "serving":
            return 0.0
        known_s = self._board.acquaintance.known_s(PeerId(record.peer_id))
        return weigh(known_s, self.reliability(record, 0.0))
