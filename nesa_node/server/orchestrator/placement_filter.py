"""Filter that decides whether this node does what a placement asks of it.

A lease on a DHT is no consensus, and a placement's signer may be wrong or lie. A placement is
accepted only if the operator allows its signer, or if this node finds the gain in its own
snapshots; in either case only if no block loses its last holder, and within the node's memory.
`MoveLimiter` limits how often the node moves. A signer of impossible promises is distrusted from
then on.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.server.orchestrator.swarm_score import (
    ScoreSwarm,
    SwarmScore,
    apply_moves,
    is_applicable,
    savings,
    stays_covered,
)
from nesa_node.swarm.dht.sealing import AnnouncedMove, PlacementNotice
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

MIN_GAIN = 0.10
_MAX_DISTRUSTED = 1024
_MAX_SIGNERS = 64
_MAX_SNAPSHOTS = 6
_MIN_OWN_GAIN = 0.01
"""Share of the cost that this node's own move must save, so that useless moves are not carried by
useful ones."""
_MAX_OVERCLAIM = 0.5
_MAX_OVERCLAIM_FACTOR = 4.0
"""A promised gain above `_MAX_OVERCLAIM_FACTOR` times the real one plus `_MAX_OVERCLAIM` is a lie:
measurements differ."""
_MAX_STRANGERS_PER_ROUND = 4
"""Placements of unknown signers judged per round: identities are free, judging takes time."""
_REJUDGE_AFTER_S = 60.0
"""Seconds until a refused placement is judged again in an unchanged swarm."""


@dataclass(frozen=True, slots=True)
class PlacementVerdict:
    """`span` is the span to serve next, None if the placement is refused; `reason` is one word.

    "allowed" and "recomputed" are reasons to accept; `PlacementFilter` lists the reasons to refuse.
    """

    span: Span | None
    reason: str


_HeldSpans = frozenset[tuple[PeerId, Span]]


class PlacementFilter:
    """One node's filter of placements. `refused` counts refusals, each placement once per reason.

    "liar": its signer is distrusted. "stale_epoch": a placement with a higher epoch, of the same
    signer or an allowed one, was accepted and is in force; among unknown signers only the gain
    counts. "absurd": it is impossible, and its signer is distrusted from now on. "doubtful": it
    looks impossible, but this node knows too little of the swarm for which it was made. "outdated":
    it starts from another span than this node serves. "no_memory", "uncovered" (a block that is
    given up would lose its last holder), "no_gain".
    """

    def __init__(
        self,
        own_peer: PeerId,
        score_swarm: ScoreSwarm,
        *,
        num_blocks: int,
        max_blocks: int,
        allowed: frozenset[PeerId] = frozenset(),
        min_gain: float = MIN_GAIN,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.distrusted: set[PeerId] = set()
        """Signers of impossible promises; the first `_MAX_DISTRUSTED` are remembered for good.
        Grows in the thread that judges: other threads may ask for a signer, not iterate."""
        self._own = own_peer
        self._score_swarm = score_swarm
        self._num_blocks = num_blocks
        self._max_blocks = max_blocks
        self._allowed = allowed
        self._min_gain = min_gain
        self._accepted_epochs: dict[PeerId, tuple[int, float]] = {}
        """Epoch and expiry of the accepted placement per signer."""
        self._queue: list[PeerId] = []
        self._refused_placements: dict[
            tuple[PeerId, tuple[int, int]], tuple[_HeldSpans, float]
        ] = {}
        """Refused placements, with the spans held in the swarm and the time."""
        self._scores: dict[tuple[int, tuple[AnnouncedMove, ...]], tuple[Snapshot, SwarmScore]] = {}
        self._snapshots: deque[Snapshot] = deque(maxlen=_MAX_SNAPSHOTS)
        self._counted_reasons: OrderedDict[PeerId, tuple[tuple[int, int], set[str]]] = OrderedDict()

    def remember_snapshot(self, snapshot: Snapshot) -> None:
        """Remember how the swarm looked, to tell lies from outdated truths.

        Links are dropped: those of a large swarm take megabytes.
        """
        self._snapshots.append(replace(snapshot, links=None))

    def select_due(
        self, placements: Iterable[PlacementNotice], snapshot: Snapshot
    ) -> list[PlacementNotice]:
        """Placements to judge in this round: they name this node, and were not refused in a swarm
        with the same spans.

        Unknown signers take turns in order of arrival, a few per round.
        """
        mine = self._for_this_node(placements, snapshot)
        layout, now = _held_spans(snapshot), snapshot.taken_at
        present = {_placement_key(placement) for placement in mine}
        self._refused_placements = {
            key: seen for key, seen in self._refused_placements.items() if key in present
        }
        fresh = [each for each in mine if self._is_fresh(each, layout, now)]
        strangers = {
            each.signer
            for each in fresh
            if each.signer not in self._allowed and each.signer not in self.distrusted
        }
        waiting = [signer for signer in self._queue if signer in strangers]
        came = [each.signer for each in fresh if each.signer in strangers - {*waiting}]
        waiting += dict.fromkeys(came)
        turn, self._queue = waiting[:_MAX_STRANGERS_PER_ROUND], waiting[_MAX_STRANGERS_PER_ROUND:]
        return [each for each in fresh if each.signer not in strangers or each.signer in turn]

    def first_accepted(
        self, placements: Iterable[PlacementNotice], snapshot: Snapshot
    ) -> tuple[PlacementNotice, PlacementVerdict] | None:
        """The first acceptable placement, highest epochs first; None without one.

        A placement may be judged repeatedly: a move that is unsafe now may be safe after other
        moves.
        """
        now, layout = snapshot.taken_at, _held_spans(snapshot)
        self._accepted_epochs = {
            peer: seen for peer, seen in self._accepted_epochs.items() if seen[1] > now
        }
        self._scores.clear()
        for placement in self._for_this_node(placements, snapshot):
            verdict = self.judge(placement, snapshot)
            if verdict.span is not None:
                self._record_accepted(placement)
                return placement, verdict
            self._refused_placements[_placement_key(placement)] = layout, now
            self._count_refusal(placement, verdict.reason)
        return None

    def judge(self, placement: PlacementNotice, snapshot: Snapshot) -> PlacementVerdict:
        move = self._own_move(placement)
        own = snapshot.find_node(self._own)
        if move is None or own is None:
            return PlacementVerdict(None, "outdated")
        if placement.signer in self.distrusted:
            return PlacementVerdict(None, "liar")
        if placement.num_blocks != self._num_blocks:
            return self._distrust(placement, f"it plans for {placement.num_blocks} blocks")
        if placement.epoch < self._min_epoch(placement.signer, snapshot.taken_at):
            return PlacementVerdict(None, "stale_epoch")
        if move.span == own.span or move.previous_span != own.span:
            return PlacementVerdict(None, "outdated")
        if len(move.span) > self._max_blocks:
            return PlacementVerdict(None, "no_memory")
        return self._judge_by_score(placement, move, own, snapshot)

    def _judge_by_score(
        self, placement: PlacementNotice, move: AnnouncedMove, own: NodeState, snapshot: Snapshot
    ) -> PlacementVerdict:
        """Judge by the score of the swarm in this node's own snapshots."""
        lie = self._find_lie(placement, snapshot)
        if lie is not None:
            # Nodes die while plans are made: it must have been a lie when it was published.
            earlier = self._snapshot_before(placement, snapshot)
            if earlier is None or self._find_lie(placement, earlier) is None:
                return PlacementVerdict(None, "doubtful")
            return self._distrust(placement, lie)
        before, after = self._score(snapshot), self._score(snapshot, placement.moves)
        if not stays_covered(snapshot, own, move.span):
            return PlacementVerdict(None, "uncovered")
        if placement.signer in self._allowed:
            return PlacementVerdict(move.span, "allowed")
        others = tuple(each for each in placement.moves if each is not move)
        without = self._score(snapshot, others)
        if after.holes < without.holes:
            return PlacementVerdict(move.span, "recomputed")
        if after.holes == before.holes and (
            self._adds_replica(before, after, without)
            or self._gains_enough(before, after, without)
            or self._spreads(before, after, without)
        ):
            return PlacementVerdict(move.span, "recomputed")
        return PlacementVerdict(None, "no_gain")

    def _find_lie(self, placement: PlacementNotice, snapshot: Snapshot) -> str | None:
        """Why the placement is impossible there; None if it is not, or was made for other spans."""
        if not all(is_applicable(snapshot, move) for move in placement.moves):
            return None
        before, after = self._score(snapshot), self._score(snapshot, placement.moves)
        gain, promised = max(savings(before, after)), placement.gain
        if after.holes > before.holes:
            return "its moves take the last holders of blocks"
        if promised > 1.0 and math.isfinite(before.latency_s):
            return f"it promises to save {promised:.0%} of the cost"
        if (
            promised > _MAX_OVERCLAIM + _MAX_OVERCLAIM_FACTOR * max(gain, 0.0)
            and before.holes == after.holes
        ):
            return f"it promises to save {promised:.0%} of the cost and saves {gain:.0%}"
        return None

    def _snapshot_before(self, placement: PlacementNotice, snapshot: Snapshot) -> Snapshot | None:
        """The last snapshot from before the placement, with today's links."""
        earlier = [each for each in self._snapshots if each.taken_at <= placement.issued_at]
        return replace(earlier[-1], links=snapshot.links) if earlier else None

    def _gains_enough(self, before: SwarmScore, after: SwarmScore, without: SwarmScore) -> bool:
        """Whether all moves together gain enough and expose no blocks to failure domains, and this
        node's move contributes."""
        goals = zip(savings(before, after), savings(without, after), strict=True)
        worst = min(savings(before, after))
        if after.exposed > before.exposed:
            return False
        return worst > -self._min_gain and any(
            whole >= self._min_gain and own >= _MIN_OWN_GAIN for whole, own in goals
        )

    def _adds_replica(self, before: SwarmScore, after: SwarmScore, without: SwarmScore) -> bool:
        """Whether this node's move gives blocks a second holder at no great cost."""
        mends = after.missing_replicas < min(before.missing_replicas, without.missing_replicas)
        return mends and min(savings(before, after)) > -self._min_gain

    def _spreads(self, before: SwarmScore, after: SwarmScore, without: SwarmScore) -> bool:
        """Whether this node's move leaves fewer blocks exposed, at no great cost."""
        less = after.exposed < min(before.exposed, without.exposed)
        return less and (
            after.missing_replicas <= before.missing_replicas
            and min(savings(before, after)) > -self._min_gain
        )

    def _score(self, snapshot: Snapshot, moves: tuple[AnnouncedMove, ...] = ()) -> SwarmScore:
        """The score after `moves`; each is computed once per round."""
        key = id(snapshot), moves
        if key not in self._scores:
            changed = apply_moves(snapshot, moves) if moves else snapshot
            # The snapshot is kept, so that its `id` is not reused.
            self._scores[key] = snapshot, self._score_swarm(changed)
        return self._scores[key][1]

    def _min_epoch(self, signer: PeerId, now: float) -> int:
        """The lowest epoch accepted."""
        # Any peer can sign any number: an unknown signer's counts for its own placements only.
        epochs = [
            epoch
            for rival, (epoch, until) in self._accepted_epochs.items()
            if until > now and (rival == signer or rival in self._allowed)
        ]
        return max(epochs, default=0)

    def _record_accepted(self, placement: PlacementNotice) -> None:
        self._accepted_epochs[placement.signer] = placement.epoch, placement.expires_at
        if len(self._accepted_epochs) > _MAX_SIGNERS:
            # Forget unknown signers before allowed ones.
            del self._accepted_epochs[
                min(
                    self._accepted_epochs,
                    key=lambda peer: (peer in self._allowed, self._accepted_epochs[peer]),
                )
            ]

    def _for_this_node(
        self, placements: Iterable[PlacementNotice], snapshot: Snapshot
    ) -> list[PlacementNotice]:
        """Those that name this node; allowed signers' first: unknown ones cannot delay them."""
        mine = [
            placement
            for placement in placements
            if placement.model_id == snapshot.model_id and self._own_move(placement) is not None
        ]
        return sorted(mine, key=lambda p: (p.signer not in self._allowed, -p.epoch, p.signer))

    def _is_fresh(self, placement: PlacementNotice, layout: _HeldSpans, now: float) -> bool:
        seen = self._refused_placements.get(_placement_key(placement))
        return seen is None or seen[0] != layout or now - seen[1] >= _REJUDGE_AFTER_S

    def _own_move(self, placement: PlacementNotice) -> AnnouncedMove | None:
        return next((move for move in placement.moves if move.peer == self._own), None)

    def _distrust(self, placement: PlacementNotice, why: str) -> PlacementVerdict:
        signer = placement.signer
        if signer not in self.distrusted and len(self.distrusted) < _MAX_DISTRUSTED:
            self.distrusted.add(signer)
            log.warning("orchestrator_distrusted", peer=signer, reason=why)
        self._accepted_epochs.pop(signer, None)
        return PlacementVerdict(None, "absurd")

    def _count_refusal(self, placement: PlacementNotice, reason: str) -> None:
        order, reasons = self._counted_reasons.get(placement.signer, (placement.order, set()))
        if order != placement.order:
            reasons = set()
        if reason not in reasons:
            self.refused[reason] += 1
            log.info(
                "placement_refused", signer=placement.signer, epoch=placement.epoch, reason=reason
            )
        self._counted_reasons[placement.signer] = placement.order, reasons | {reason}
        self._counted_reasons.move_to_end(placement.signer)
        if len(self._counted_reasons) > _MAX_SIGNERS:
            self._counted_reasons.popitem(last=False)


def _placement_key(placement: PlacementNotice) -> tuple[PeerId, tuple[int, int]]:
    return placement.signer, placement.order


def _held_spans(snapshot: Snapshot) -> _HeldSpans:
    return frozenset((node.peer_id, node.span) for node in snapshot.nodes)
