"""Rebalancing, R: S x P -> S' (paper, eq. 3): a better placement by few moves.

Losses are repaired at once: blocks without a holder, then missing replicas. Other moves need a
minimum gain (`Policy`). The paper's R has no such threshold and moves at every network change.
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
"""Nodes above which a given start assignment replaces the search for pipelines."""
_SINGLES = 48
_WORTH_TRYING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Thresholds for moves without a loss, and the limit on moves.

    `min_gain`: least share of the goal's cost to save. `horizon_s`: time within which the gain must
    exceed the cost of moving. `max_moves`: most moves per plan, repairs included.
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
    """The moves that improve the placement recorded in `snapshot`; `pinned` nodes never move.

    Joining nodes count as holders but not as ready: no move relies on them before they have moved.
    After a loss the plan contains only repairs; gains are considered in the next snapshot. `start`:
    an assignment (of a schema) whose best chains are tried first; in large swarms it replaces the
    search for pipelines.
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
    # Without moves, report the missing replicas rather than the gain that was too small.
    return gained if gained.moves else mended


def confirmed(earlier: Moves | None, now: Moves) -> Moves:
    """`now`, unless it moves for a gain that the plan of the snapshot before did not find."""
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
    """Indices of nodes that must not move."""
    start: Layout | None = None

    def mended(self) -> Moves:
        """Moves that repair missing blocks and replicas, smallest load first."""
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
        """The moves with the largest net gain, if it passes the policy."""
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
        """Single moves that reduce the deficit, most effective first, then smallest load."""
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
        """Candidate assignments a few moves away, each with the nodes that move."""
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
        """Candidate chains whose nodes would have to move to the spans they run."""
        if self.start is not None:
            for client in range(len(self.room.clients)):
                yield best_chain(self.room.problem_of(self.start, client)) or ()
        if self.start is None or self.room.problem.num_nodes <= FEW_NODES:
            yield from Pipelines(self.room).first(2 * len(self.room.clients))

    def _best_single(
        self, layout: Layout, score: Score, moved: Sequence[int]
    ) -> tuple[Layout, Score, int] | None:
        """The move of one more node that saves most latency.

        Candidate spans are those that a node would run if it held all blocks.
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
        """The wave number of each node that can move safely."""
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
    """`layout` with the visit's node moved by the least distance that covers the visit.

    If the visit does not fit, its beginning is covered.
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
