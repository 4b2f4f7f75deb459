"""R: S x P -> S' (paper, eq. 3): from what nodes hold to something better, by few moves.

A loss is mended at once: blocks that nobody holds, then replicas that are missing. Otherwise
something moves only for a gain that is worth the trouble: `Policy` says how much. The paper's R has
no such threshold, and moves whenever the network does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.placement.capacity import make_room
from nesa_node.routing.placement.improve import most_wanted, widen
from nesa_node.routing.placement.moves import (
    Move,
    MoveCosts,
    Moves,
    Trigger,
    in_waves,
    price,
    saving,
    share_away_s,
)
from nesa_node.routing.placement.pipeline import promising
from nesa_node.routing.placement.recipes import Pipelines
from nesa_node.routing.placement.room import Lacks, Layout, Room
from nesa_node.routing.placement.score import Goal, Score, best_chain, measure
from nesa_node.routing.problem import Chain, Visit
from nesa_node.topology.snapshot import Snapshot

FEW_NODES = 200
"""With more, pipelines are not searched for where a layout to start from is given."""
_SINGLES = 48
_WORTH_TRYING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to move without a loss: a gain of `min_gain` of the goal's cost at least, which exceeds
    what moving costs within `horizon_s`, by `max_moves` at most (which also bounds mending).
    """

    min_gain: float = 0.10
    horizon_s: float = 3600.0
    max_moves: int = 4


def rebalance(
    snapshot: Snapshot,
    requests: Request | Sequence[Request],
    *,
    goal: Goal = "latency",
    replicas: int = 2,
    policy: Policy | None = None,
    costs: MoveCosts | None = None,
    pinned: frozenset[PeerId] = frozenset(),
    start: Layout | None = None,
) -> Moves:
    """What should move in `snapshot`, where nodes hold what their records say; never the `pinned`.

    Joining nodes count as holders, since they soon will be, but not as ready ones: no move relies
    on them before it has made them so. With a loss the moves that mend it are all there is: what
    could be gained beside is seen in the next snapshot. `start` is a layout of a room made so
    (a schema's): the way to its best chains is looked at first, and takes the place of the search
    for pipelines where there are many nodes.
    """
    policy, costs = policy or Policy(), costs or MoveCosts()
    room = make_room(snapshot, requests, replicas=replicas)
    fixed = frozenset(row for row, peer in enumerate(room.problem.peers) if peer in pinned)
    search = _Search(snapshot, room, goal, policy, costs, fixed, start)
    lacks = room.now().lacks(room)
    if not lacks.replicas:
        return search.gained()
    mended = search.mended()
    if mended.moves or lacks.holes:
        return mended
    gained = search.gained()
    # Where nothing moves, what is missing matters more than what could not be gained.
    return gained if gained.moves else mended


def confirmed(earlier: Moves | None, now: Moves) -> Moves:
    """`now`, unless it moves for a gain that the plan for the snapshot before it did not see."""
    if now.trigger != "gain" or (earlier is not None and earlier.trigger == "gain"):
        return now
    return nothing(now.before, now.goal, f"{now.gain:.0%} could be gained, seen only once so far")


def nothing(score: Score, goal: Goal, refused: str = "") -> Moves:
    return Moves(
        goal=goal,
        trigger="none",
        moves=(),
        before=score,
        after=score,
        cost_s=0.0,
        refused=refused,
    )


@dataclass(frozen=True, slots=True)
class _Search:
    snapshot: Snapshot
    room: Room
    goal: Goal
    policy: Policy
    costs: MoveCosts
    fixed: frozenset[int]
    """Nodes that stay where they are."""
    start: Layout | None = None

    def mended(self) -> Moves:
        """Moves for blocks that nobody holds and replicas that are missing, least to load first."""
        now = self.room.now()
        lacks = now.lacks(self.room)
        trigger: Trigger = "hole" if lacks.holes else "replicas"
        layout, moving, unsafe = now, list[int](), 0
        while lacks.replicas and len(moving) < self.policy.max_moves:
            chosen = None
            for node, moved in self._mending(layout, lacks, moving):
                if len(self._waves(now, moved, [*moving, node])) == len(moving) + 1:
                    chosen = (node, moved)
                    break
                unsafe += 1
            if chosen is None:
                break
            moving.append(chosen[0])
            layout = chosen[1]
            lacks = layout.lacks(self.room)
        before = measure(self.room, now)
        if not moving:
            why = f"{lacks.holes} blocks have no holder and {lacks.replicas} replicas are missing"
            idle = "no node that may move has memory to spare for them"
            return nothing(before, self.goal, f"{why}; {'no move is safe' if unsafe else idle}")
        left = f"{lacks.replicas} replicas are still missing" if lacks.replicas else ""
        return self._moves(now, layout, moving, trigger, before, left)

    def gained(self) -> Moves:
        """The moves that gain most, if it is worth it."""
        now = self.room.now()
        before = measure(self.room, now)
        best: Moves | None = None
        for layout, moving in self._gaining(now, before):
            if not self.fixed.isdisjoint(moving):
                continue
            found = self._moves(now, layout, moving, "gain", before, "")
            if len(found.moves) < len(moving) or found.after.lacks > before.lacks:
                continue
            if found.gain > 0 and (best is None or self._net(found) > self._net(best)):
                best = found
        if best is None:
            return nothing(before, self.goal)
        if best.gain < self.policy.min_gain:
            why = f"less than {self.policy.min_gain:.0%}"
        elif best.pays_back_s > self.policy.horizon_s:
            why = f"not within {self.policy.horizon_s:.0f} s what moving costs"
        else:
            return best
        return nothing(before, self.goal, f"{best.gain:.1%} could be gained: {why}")

    def _net(self, moves: Moves) -> float:
        return moves.gain - moves.cost_s / self.policy.horizon_s

    def _mending(
        self, layout: Layout, lacks: Lacks, moved: Sequence[int]
    ) -> Iterator[tuple[int, Layout]]:
        """Single moves that mend something, those that mend most first, then the least to load."""
        found = []
        for node in range(self.room.problem.num_nodes):
            if node in moved or node in self.fixed:
                continue
            candidate = most_wanted(self.room, layout, node)
            left = candidate.lacks(self.room)
            if left < lacks:
                old, new = layout.span(node), candidate.span(node)
                load = len(new) - max(0, min(old.end, new.end) - max(old.start, new.start))
                found.append(((left, load, node), candidate))
        for (_, _, node), candidate in sorted(found, key=lambda each: each[0]):
            yield node, candidate

    def _gaining(self, now: Layout, before: Score) -> Iterator[tuple[Layout, list[int]]]:
        """Layouts a few moves away that might be better, and who moves."""
        limit = self.policy.max_moves
        if self.goal == "throughput":
            wider = widen(self.room, now, max_moves=limit)
            yield wider, _changed(now, wider)
            return
        for chain in self._chains():
            layout = now
            for visit in chain:
                layout = _holding_run(self.room, layout, visit)
            moving = _changed(now, layout)
            if 0 < len(moving) <= limit:
                yield layout, moving
        layout, score, moving = now, before, list[int]()
        while len(moving) < limit:
            step = self._best_single(layout, score, moving)
            if step is None:
                break
            layout, score, node = step
            moving.append(node)
            yield layout, list(moving)

    def _chains(self) -> Iterator[Chain]:
        """Chains that might be good if nodes held what they run."""
        if self.start is not None:
            for client in range(len(self.room.clients)):
                yield best_chain(self.room.problem_of(self.start, client)) or ()
        if self.start is None or self.room.problem.num_nodes <= FEW_NODES:
            yield from Pipelines(self.room).first(2 * len(self.room.clients))

    def _best_single(
        self, layout: Layout, score: Score, moved: Sequence[int]
    ) -> tuple[Layout, Score, int] | None:
        """The move of one more node that saves most latency.

        A node that could hold everything shows where it would be used; that cost is a bound.
        """
        best: tuple[Layout, Score, int] | None = None
        everyone = np.arange(self.room.problem.num_nodes)
        few = max(4, min(_SINGLES, 15_000 // max(len(everyone), 1)))
        for node in promising(self.room, everyone)[:few].tolist():
            if node in moved or node in self.fixed:
                continue
            everywhere = layout.moved(node, Span(0, self.room.problem.num_blocks))
            for candidate in self._used_parts(layout, everywhere, node):
                found = measure(self.room, candidate)
                if found.lacks > score.lacks:
                    continue
                least_s = (best[1] if best else score).latency_s
                if found.latency_s < least_s * (1 - _WORTH_TRYING):
                    best = (candidate, found, node)
        return best

    def _used_parts(self, layout: Layout, everywhere: Layout, node: int) -> Iterator[Layout]:
        seen = {layout.span(node)}
        for client in range(len(self.room.clients)):
            chain = best_chain(self.room.problem_of(everywhere, client)) or ()
            for visit in chain:
                if visit.node != node:
                    continue
                candidate = _holding_run(self.room, layout, visit)
                if candidate.span(node) not in seen:
                    seen.add(candidate.span(node))
                    yield candidate

    def _waves(self, now: Layout, after: Layout, moving: Sequence[int]) -> dict[int, int]:
        """The wave of each node that can safely move."""
        serving = {node.peer_id for node in self.snapshot.nodes}
        ready = frozenset(
            row for row, peer in enumerate(self.room.problem.peers) if peer in serving
        )
        broken = now.lacks(self.room).holes > 0
        blocks = self.room.problem.num_blocks
        waves = in_waves(blocks, now, after, moving, ready=ready, broken=broken)
        return {node: number for number, wave in enumerate(waves) for node in wave}

    def _moves(
        self,
        now: Layout,
        after: Layout,
        moving: Sequence[int],
        trigger: Trigger,
        before: Score,
        refused: str,
    ) -> Moves:
        wave_of = self._waves(now, after, moving)
        ordered = sorted(wave_of, key=lambda node: (wave_of[node], moving.index(node)))
        states = {node.peer_id: node for node in (*self.snapshot.nodes, *self.snapshot.joining)}
        layout, score = now, before
        moves = []
        for node in ordered:
            layout = layout.moved(node, after.span(node))
            then = measure(self.room, layout)
            peer = self.room.problem.peers[node]
            load_bytes, load_s, cache_tokens, hand_over_s = price(
                states[peer], now.span(node), after.span(node), self.costs
            )
            moves.append(
                Move(
                    peer_id=peer,
                    before=now.span(node),
                    after=after.span(node),
                    reason=trigger,
                    gain=saving(score, then, self.goal),
                    load_bytes=load_bytes,
                    load_s=load_s,
                    cache_tokens=cache_tokens,
                    hand_over_s=hand_over_s,
                    wave=wave_of[node],
                )
            )
            score = then
        away = {node: move.away_s for node, move in zip(ordered, moves, strict=True)}
        return Moves(
            goal=self.goal,
            trigger=trigger,
            moves=tuple(moves),
            before=before,
            after=score,
            cost_s=share_away_s(self.room, away),
            refused=refused,
        )


def _holding_run(room: Room, layout: Layout, visit: Visit) -> Layout:
    """`layout` with the visit's run on its node, moved no further than it takes.

    Of a run that does not fit, the beginning.
    """
    here = layout.span(visit.node)
    most = int(room.most_N[visit.node])
    end = min(visit.end, visit.start + most)
    if here.start <= visit.start and end <= here.end:
        return layout
    start = min(max(here.start, end - most, 0), visit.start, room.problem.num_blocks - most)
    return layout.moved(visit.node, Span(start, start + most))


def _changed(before: Layout, after: Layout) -> list[int]:
    differs_N = (before.starts_N != after.starts_N) | (before.ends_N != after.ends_N)
    changed: list[int] = np.flatnonzero(differs_N).tolist()
    return changed
