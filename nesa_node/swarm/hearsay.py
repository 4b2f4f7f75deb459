"""What this node thinks of others' reliability: their record here, and what is reported of them."""

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
"""An uptime that is so much lower than the last one began anew."""


@dataclass(frozen=True, slots=True)
class Ends:
    """How often a node's time in the swarm has ended here: without notice, and planned."""

    failures: int = 0
    drains: int = 0


class Histories:
    """Counts how nodes end, from the records that pass.

    Of 4,096 peers; for the next one that is forgotten of which it matters least, in constant time
    since many records may expire at once. Identities are free: those that fail once each push out
    no peer that failed more often.
    """

    def __init__(self) -> None:
        # Those without a failure, with one, and with more; of each the longest unchanged first.
        self._by_failures = tuple(OrderedDict[PeerId, Ends]() for _ in range(3))

    def replaced(self, before: NodeRecord, after: NodeRecord) -> None:
        """`after` is the newer record of the same peer."""
        if before.state == "serving" and after.state in ("draining", "withdrawn"):
            self._note(before, drains=1)
        elif before.state == "serving" and after.uptime_s < before.uptime_s - _RESTART_S:
            self._note(before, failures=1)

    def expired(self, record: NodeRecord) -> None:
        """The record has ended without having been replaced, while others' went on."""
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
    """`own` is this node's peer id: what it says itself is not heard again."""

    def __init__(self, board: NoticeBoard, own: PeerId, *, clock: Callable[[], float]) -> None:
        self.histories = Histories()
        self._board = board
        self._own = own
        self._clock = clock

    def blames(self, model_id: ModelId, records: Iterable[NodeRecord]) -> Mapping[PeerId, float]:
        """Of everybody accused now; `records` are of those whose word may count."""
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
        """Who boasts of its speed, in reporters of long standing (`corroborated`)."""
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
