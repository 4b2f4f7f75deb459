"""Filter that decides whether this node does what a placement asks of it.

A lease on a DHT is no consensus, and a placement's signer may be wrong or lie. A placement is
accepted only if the operator allows its signer, or if this node finds the gain in its own
snapshots; in either case only if no block loses its last holder, and within the node's memory.
`Moves` limits how often the node moves. A signer of impossible promises is distrusted from then on.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.server.worth import Appraise, Worth, covered_without, holds, moved, savings
from nesa_node.swarm.notices import Move, Placement
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

MIN_GAIN = 0.10
_MAX_LIARS = 1024
_MAX_SIGNERS = 64
_PICTURES = 6
_MATTERS = 0.01
"""Share of the cost that this node's own move must save, so that useless moves are not carried by
useful ones."""
_EXAGGERATED = 0.5
_TIMES = 4.0
"""A promised gain above `_TIMES` times the real one plus `_EXAGGERATED` is a lie: measurements
differ."""
_MAX_WEIGHED = 4
"""Placements of unknown signers judged per round: identities are free, judging takes time."""
_WEIGH_AGAIN_S = 60.0
"""Seconds until a refused placement is judged again in an unchanged swarm."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`span` is the span to serve next, None if the placement is refused; `reason` is one word.

    "allowed" and "recomputed" are reasons to accept; `Obedience` lists the reasons to refuse.
    """

    span: Span | None
    reason: str


class Liars(Set[PeerId]):
    """Signers of impossible promises; the first `_MAX_LIARS` are remembered for good."""

    def __init__(self) -> None:
        self._known: OrderedDict[PeerId, str] = OrderedDict()

    def __contains__(self, peer: object) -> bool:
        return peer in self._known

    def __iter__(self) -> Iterator[PeerId]:
        return iter(tuple(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def note(self, peer: PeerId, why: str) -> None:
        if peer not in self._known and len(self._known) < _MAX_LIARS:
            self._known[peer] = why
            log.warning("orchestrator_distrusted", peer=peer, reason=why)


_Layout = frozenset[tuple[PeerId, Span]]


class Obedience:
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
        own: PeerId,
        appraise: Appraise,
        *,
        num_blocks: int,
        max_blocks: int,
        allowed: frozenset[PeerId] = frozenset(),
        min_gain: float = MIN_GAIN,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.liars = Liars()
        self._own = own
        self._appraise = appraise
        self._num_blocks = num_blocks
        self._max_blocks = max_blocks
        self._allowed = allowed
        self._min_gain = min_gain
        self._epochs: dict[PeerId, tuple[int, float]] = {}
        """Epoch and expiry of the accepted placement per signer."""
        self._queue: list[PeerId] = []
        self._weighed: dict[tuple[PeerId, tuple[int, int]], tuple[_Layout, float]] = {}
        """Refused placements, with the spans held in the swarm and the time."""
        self._worths: dict[tuple[int, tuple[Move, ...]], tuple[Snapshot, Worth]] = {}
        self._pictures: deque[Snapshot] = deque(maxlen=_PICTURES)
        self._counted: OrderedDict[PeerId, tuple[tuple[int, int], set[str]]] = OrderedDict()

    def glance(self, snapshot: Snapshot) -> None:
        """Remember how the swarm looked, to tell lies from outdated truths.

        Links are dropped: those of a large swarm take megabytes.
        """
        self._pictures.append(replace(snapshot, links=None))

    def due(self, placements: Iterable[Placement], snapshot: Snapshot) -> list[Placement]:
        """Placements to judge in this round: they name this node, and were not refused in a swarm
        with the same spans.

        Unknown signers take turns in order of arrival, a few per round.
        """
        mine = self._mine(placements, snapshot)
        layout, now = _layout(snapshot), snapshot.taken_at
        present = {_key(placement) for placement in mine}
        self._weighed = {key: seen for key, seen in self._weighed.items() if key in present}
        fresh = [each for each in mine if self._is_fresh(each, layout, now)]
        strangers = {
            each.signer
            for each in fresh
            if each.signer not in self._allowed and each.signer not in self.liars
        }
        waiting = [signer for signer in self._queue if signer in strangers]
        came = [each.signer for each in fresh if each.signer in strangers - {*waiting}]
        waiting += dict.fromkeys(came)
        turn, self._queue = waiting[:_MAX_WEIGHED], waiting[_MAX_WEIGHED:]
        return [each for each in fresh if each.signer not in strangers or each.signer in turn]

    def consider(
        self, placements: Iterable[Placement], snapshot: Snapshot
    ) -> tuple[Placement, Verdict] | None:
        """The first acceptable placement, highest epochs first; None without one.

        A placement may be judged repeatedly: a move that is unsafe now may be safe after other
        moves.
        """
        now, layout = snapshot.taken_at, _layout(snapshot)
        self._epochs = {peer: seen for peer, seen in self._epochs.items() if seen[1] > now}
        self._worths.clear()
        for placement in self._mine(placements, snapshot):
            verdict = self.judge(placement, snapshot)
            if verdict.span is not None:
                self._obeyed(placement)
                return placement, verdict
            self._weighed[_key(placement)] = layout, now
            self._count(placement, verdict.reason)
        return None

    def judge(self, placement: Placement, snapshot: Snapshot) -> Verdict:
        move = self._move(placement)
        own = snapshot.node(self._own)
        if move is None or own is None:
            return Verdict(None, "outdated")
        if placement.signer in self.liars:
            return Verdict(None, "liar")
        if placement.num_blocks != self._num_blocks:
            return self._lie(placement, f"it plans for {placement.num_blocks} blocks")
        if placement.epoch < self._epoch_to_beat(placement.signer, snapshot.taken_at):
            return Verdict(None, "stale_epoch")
        if move.span == own.span or move.old_span != own.span:
            return Verdict(None, "outdated")
        if len(move.span) > self._max_blocks:
            return Verdict(None, "no_memory")
        return self._weigh(placement, move, own, snapshot)

    def _weigh(
        self, placement: Placement, move: Move, own: NodeState, snapshot: Snapshot
    ) -> Verdict:
        """Judge by the score of the swarm in this node's own snapshots."""
        lie = self._lie_in(placement, snapshot)
        if lie is not None:
            # Nodes die while plans are made: it must have been a lie when it was published.
            earlier = self._before(placement, snapshot)
            if earlier is None or self._lie_in(placement, earlier) is None:
                return Verdict(None, "doubtful")
            return self._lie(placement, lie)
        before, after = self._worth(snapshot), self._worth(snapshot, placement.moves)
        if not covered_without(snapshot, own, move.span):
            return Verdict(None, "uncovered")
        if placement.signer in self._allowed:
            return Verdict(move.span, "allowed")
        others = tuple(each for each in placement.moves if each is not move)
        without = self._worth(snapshot, others)
        if after.holes < without.holes:
            return Verdict(move.span, "recomputed")
        if after.holes == before.holes and (
            self._thickens(before, after, without) or self._gains(before, after, without)
        ):
            return Verdict(move.span, "recomputed")
        return Verdict(None, "no_gain")

    def _lie_in(self, placement: Placement, snapshot: Snapshot) -> str | None:
        """Why the placement is impossible in that snapshot; None if it is possible, or was made for
        a swarm with other spans.
        """
        if not all(holds(snapshot, move) for move in placement.moves):
            return None
        before, after = self._worth(snapshot), self._worth(snapshot, placement.moves)
        gain, promised = max(savings(before, after)), placement.gain
        if after.holes > before.holes:
            return "its moves take the last holders of blocks"
        if promised > 1.0 and math.isfinite(before.latency_s):
            return f"it promises to save {promised:.0%} of the cost"
        if promised > _EXAGGERATED + _TIMES * max(gain, 0.0) and before.holes == after.holes:
            return f"it promises to save {promised:.0%} of the cost and saves {gain:.0%}"
        return None

    def _before(self, placement: Placement, snapshot: Snapshot) -> Snapshot | None:
        """The last snapshot from before the placement, with today's links."""
        earlier = [each for each in self._pictures if each.taken_at <= placement.issued_at]
        return replace(earlier[-1], links=snapshot.links) if earlier else None

    def _gains(self, before: Worth, after: Worth, without: Worth) -> bool:
        """Whether all moves together gain enough, and this node's move contributes."""
        goals = zip(savings(before, after), savings(without, after), strict=True)
        worst = min(savings(before, after))
        return worst > -self._min_gain and any(
            whole >= self._min_gain and own >= _MATTERS for whole, own in goals
        )

    def _thickens(self, before: Worth, after: Worth, without: Worth) -> bool:
        """Whether this node's move gives blocks a second holder at no great cost."""
        mends = after.thin < min(before.thin, without.thin)
        return mends and min(savings(before, after)) > -self._min_gain

    def _worth(self, snapshot: Snapshot, moves: tuple[Move, ...] = ()) -> Worth:
        """The score after `moves`; each is computed once per round."""
        key = id(snapshot), moves
        if key not in self._worths:
            changed = moved(snapshot, moves) if moves else snapshot
            # The snapshot is kept, so that its `id` is not reused.
            self._worths[key] = snapshot, self._appraise(changed)
        return self._worths[key][1]

    def _epoch_to_beat(self, signer: PeerId, now: float) -> int:
        """The lowest epoch accepted. An unknown signer's epoch counts for its own placements only,
        since any peer can sign any number.
        """
        return max(
            (
                epoch
                for rival, (epoch, until) in self._epochs.items()
                if until > now and (rival == signer or rival in self._allowed)
            ),
            default=0,
        )

    def _obeyed(self, placement: Placement) -> None:
        self._epochs[placement.signer] = placement.epoch, placement.expires_at
        if len(self._epochs) > _MAX_SIGNERS:
            # Forget unknown signers before allowed ones.
            del self._epochs[
                min(self._epochs, key=lambda peer: (peer in self._allowed, self._epochs[peer]))
            ]

    def _mine(self, placements: Iterable[Placement], snapshot: Snapshot) -> list[Placement]:
        """Placements that name this node, those of allowed signers first, so that unknown ones
        cannot delay them.
        """
        mine = [
            placement
            for placement in placements
            if placement.model_id == snapshot.model_id and self._move(placement) is not None
        ]
        return sorted(mine, key=lambda p: (p.signer not in self._allowed, -p.epoch, p.signer))

    def _is_fresh(self, placement: Placement, layout: _Layout, now: float) -> bool:
        seen = self._weighed.get(_key(placement))
        return seen is None or seen[0] != layout or now - seen[1] >= _WEIGH_AGAIN_S

    def _move(self, placement: Placement) -> Move | None:
        return next((move for move in placement.moves if move.peer == self._own), None)

    def _lie(self, placement: Placement, why: str) -> Verdict:
        self.liars.note(placement.signer, why)
        self._epochs.pop(placement.signer, None)
        return Verdict(None, "absurd")

    def _count(self, placement: Placement, reason: str) -> None:
        order, reasons = self._counted.get(placement.signer, (placement.order, set()))
        if order != placement.order:
            reasons = set()
        if reason not in reasons:
            self.refused[reason] += 1
            log.info(
                "placement_refused", signer=placement.signer, epoch=placement.epoch, reason=reason
            )
        self._counted[placement.signer] = placement.order, reasons | {reason}
        self._counted.move_to_end(placement.signer)
        if len(self._counted) > _MAX_SIGNERS:
            self._counted.popitem(last=False)


def _key(placement: Placement) -> tuple[PeerId, tuple[int, int]]:
    return placement.signer, placement.order


def _layout(snapshot: Snapshot) -> _Layout:
    return frozenset((node.peer_id, node.span) for node in snapshot.nodes)
