"""Rebalancing, R: S x P -> S' (paper, eq. 3): a better placement by few moves.

Losses are repaired at once: blocks without a holder, then missing replicas. Other moves need a
minimum gain (`RebalancePolicy`), or spread the holders of blocks that one failure domain could take
(`spread.py`). The paper's R has no such threshold and moves at every network change. Blocks that
are likely to lose all holders soon get another one ahead, where that leaves no block worse today.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import Chain, ChainRequest, Visit
from nesa_node.routing.placement.assignment_search import balance_throughput, move_to_deficit
from nesa_node.routing.placement.moves import (
    MoveCosts,
    MoveReason,
    PlannedMove,
    RebalancePlan,
    describe_lost,
    move_cost,
    relative_gain,
    schedule_waves,
    swarm_seconds_lost,
)
from nesa_node.routing.placement.pipeline import rank_nodes
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    CoverageDeficit,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.recipes import Pipelines
from nesa_node.routing.placement.score import Goal, PlacementScore, best_chain, score_assignment
from nesa_node.routing.placement.spread import ExposureSearch, spreading_moves
from nesa_node.topology.snapshot import Snapshot

MAX_PIPELINE_SEARCH_NODES = 200
"""Nodes above which a given start assignment replaces the search for pipelines."""
_MAX_SINGLE_MOVES = 48
_MIN_STEP_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """Thresholds for moves without a loss, and the limit on moves.

    `min_gain`: least share of the goal's cost to save. `horizon_s`: time within which the gain must
    exceed the cost of moving. `max_moves`: most moves per plan, repairs included.
    """

    min_gain: float = 0.10
    horizon_s: float = 3600.0
    max_moves: int = 4


def rebalance(
    snapshot: Snapshot,
    requests: ChainRequest | Sequence[ChainRequest],
    *,
    goal: Goal = "latency",
    replicas: int = 2,
    policy: RebalancePolicy | None = None,
    costs: MoveCosts | None = None,
    pinned: frozenset[PeerId] = frozenset(),
    start: Assignment | None = None,
    leaving: Mapping[PeerId, float] | None = None,
) -> RebalancePlan:
    """The moves that improve the placement recorded in `snapshot`; `pinned` nodes never move.

    Joining nodes count as holders but not as ready: no move relies on them before they have moved.
    After a loss the plan contains only repairs; gains are considered in the next snapshot, and
    spreading where nothing is gained. No gain exposes more blocks to a failure domain. `start`:
    an assignment (of a schema) whose best chains are tried first; in large swarms it replaces the
    search for pipelines. `leaving`: nodes that are likely to leave soon, and when (seconds since
    the epoch).
    """
    instance = make_placement_problem(snapshot, requests, replicas=replicas)
    return rebalance_problem(
        snapshot,
        instance,
        goal=goal,
        policy=policy,
        costs=costs,
        pinned=pinned,
        start=start,
        leaving=leaving,
    )


def rebalance_problem(
    snapshot: Snapshot,
    instance: PlacementProblem,
    *,
    goal: Goal = "latency",
    policy: RebalancePolicy | None = None,
    costs: MoveCosts | None = None,
    pinned: frozenset[PeerId] = frozenset(),
    start: Assignment | None = None,
    leaving: Mapping[PeerId, float] | None = None,
) -> RebalancePlan:
    """The same where the placement problem of `snapshot` is known."""
    policy, costs = policy or RebalancePolicy(), costs or MoveCosts()
    fixed = frozenset(row for row, peer in enumerate(instance.problem.peers) if peer in pinned)
    left = {
        row: leaving[peer]
        for row, peer in enumerate(instance.problem.peers)
        if leaving and peer in leaving
    }
    search = RebalanceSearch(snapshot, instance, goal, policy, costs, fixed, start, left)
    deficit = instance.current_assignment().deficit(instance)
    nothing = None
    if deficit.replicas:
        mended = search.plan_repairs()
        if mended.moves or deficit.holes:
            return mended
        # Without moves, report the missing replicas rather than the gain that was too small.
        nothing = mended
    if (ahead := search.plan_ahead()) is not None:
        return ahead
    gained = search.plan_gains()
    if gained.moves:
        return gained
    return search.plan_spread() or nothing or gained


def require_repeated_trigger(earlier: RebalancePlan | None, now: RebalancePlan) -> RebalancePlan:
    """`now`, unless it moves for a gain, or to spread holders, and the plan of the snapshot before
    did not."""
    if now.trigger not in ("gain", "spread") or (earlier and earlier.trigger == now.trigger):
        return now
    found = f"{now.gain:.0%} could be gained" if now.trigger == "gain" else now.describe_spread()
    return no_moves(now.before, now.goal, f"{found}, seen only once so far")


def no_moves(score: PlacementScore, goal: Goal, refused: str = "") -> RebalancePlan:
    return RebalancePlan(
        goal=goal,
        trigger="none",
        moves=(),
        before=score,
        after=score,
        cost_s=0.0,
        refused=refused,
    )


@dataclass(frozen=True, slots=True)
class RebalanceSearch:
    """The searches of `rebalance`, one per kind of move."""

    snapshot: Snapshot
    instance: PlacementProblem
    goal: Goal
    policy: RebalancePolicy
    costs: MoveCosts
    pinned_nodes: frozenset[int]
    """Indices of nodes that must not move."""
    start: Assignment | None = None
    leaving: Mapping[int, float] = field(default_factory=dict)
    """Indices of nodes that are likely to leave, and when (seconds since the epoch)."""

    def plan_repairs(self) -> RebalancePlan:
        """Moves that repair missing blocks and replicas, smallest load first."""
        now = self.instance.current_assignment()
        deficit = now.deficit(self.instance)
        trigger: MoveReason = "hole" if deficit.holes else "replicas"
        assignment, moving, unsafe = now, list[int](), 0
        while deficit.replicas and len(moving) < self.policy.max_moves:
            chosen = None
            for node, moved in self._repairing_moves(assignment, deficit, moving):
                if len(self._waves_by_node(now, moved, [*moving, node])) == len(moving) + 1:
                    chosen = (node, moved)
                    break
                unsafe += 1
            if chosen is None:
                break
            moving.append(chosen[0])
            assignment = chosen[1]
            deficit = assignment.deficit(self.instance)
        before = score_assignment(self.instance, now)
        if not moving:
            why = (
                f"{deficit.holes} blocks have no holder and {deficit.replicas} replicas are missing"
            )
            idle = "no node that may move has memory to spare for them"
            return no_moves(before, self.goal, f"{why}; {'no move is safe' if unsafe else idle}")
        left = f"{deficit.replicas} replicas are still missing" if deficit.replicas else ""
        return self._make_plan(now, assignment, moving, trigger, before, left)

    def plan_ahead(self) -> RebalancePlan | None:
        """Moves after which fewer blocks lose all holders with the nodes that are likely to leave;
        None without any. No move takes a holder or a replica of which too few are there now."""
        now = self.instance.current_assignment()
        assignment, moving = now, list[int]()
        while len(moving) < self.policy.max_moves and self._lost_blocks(assignment):
            step = self._step_ahead(now, assignment, moving)
            if step is None:
                break
            moving.append(step[0])
            assignment = step[1]
        if not moving:
            return None
        before = score_assignment(self.instance, now)
        plan = self._make_plan(now, assignment, moving, "ahead", before, "")
        return replace(plan, forecast=describe_lost(self.instance, now, self.leaving))

    def _step_ahead(
        self, now: Assignment, assignment: Assignment, moving: Sequence[int]
    ) -> tuple[int, Assignment] | None:
        """The move of one more node that keeps most blocks from losing all holders."""
        staying = assignment.without(self.leaving)
        deficit = staying.deficit(self.instance)
        for node, kept in self._repairing_moves(staying, deficit, [*moving, *self.leaving]):
            if kept.deficit(self.instance).holes >= deficit.holes:
                break
            moved = assignment.with_span(node, kept.span(node))
            if moved.deficit(self.instance) > assignment.deficit(self.instance):
                continue
            if len(self._waves_by_node(now, moved, [*moving, node])) == len(moving) + 1:
                return node, moved
        return None

    def _lost_blocks(self, assignment: Assignment) -> int:
        """Blocks without a holder when the nodes that are likely to leave have left, if any are."""
        if not self.leaving:
            return 0
        return assignment.without(self.leaving).deficit(self.instance).holes

    def plan_gains(self) -> RebalancePlan:
        """The moves with the largest net gain, if it passes the policy."""
        now = self.instance.current_assignment()
        before = score_assignment(self.instance, now)
        best: RebalancePlan | None = None
        for assignment, moving in self._gaining_assignments(now, before):
            if not self.pinned_nodes.isdisjoint(moving):
                continue
            found = self._make_plan(now, assignment, moving, "gain", before, "")
            if len(found.moves) < len(moving) or found.after.deficit > before.deficit:
                continue
            if found.after.exposed > before.exposed:
                continue
            if self._lost_blocks(assignment) > self._lost_blocks(now):
                continue
            if found.gain > 0 and (best is None or self._net_gain(found) > self._net_gain(best)):
                best = found
        if best is None:
            return no_moves(before, self.goal)
        if best.gain < self.policy.min_gain:
            why = f"less than {self.policy.min_gain:.0%}"
        elif best.payback_s > self.policy.horizon_s:
            why = f"not within {self.policy.horizon_s:.0f} s what moving costs"
        else:
            return best
        return no_moves(before, self.goal, f"{best.gain:.1%} could be gained: {why}")

    def plan_spread(self) -> RebalancePlan | None:
        """The moves that leave fewer blocks exposed to a failure domain; None without any."""
        now = self.instance.current_assignment()
        before = score_assignment(self.instance, now)
        best: RebalancePlan | None = None
        assignment, moving = now, list[int]()
        while len(moving) < self.policy.max_moves:
            fixed = self.pinned_nodes | {*moving}
            for node, spread in spreading_moves(self.instance, assignment, self.goal, fixed):
                found = self._make_plan(now, spread, [*moving, node], "spread", before, "")
                if self._lost_blocks(spread) > self._lost_blocks(now):
                    continue
                if len(found.moves) > len(moving) and found.spreads:
                    best, assignment = found, spread
                    moving.append(node)
                    break
            else:
                break
        return best

    def _net_gain(self, moves: RebalancePlan) -> float:
        return moves.gain - moves.cost_s / self.policy.horizon_s

    def _repairing_moves(
        self, assignment: Assignment, deficit: CoverageDeficit, moved: Sequence[int]
    ) -> Iterator[tuple[int, Assignment]]:
        """Single moves that reduce the deficit, most effective first, then smallest load.

        Without a hole, where time matters less, those that expose fewest blocks precede.
        """
        found = []
        exposures = None if deficit.holes else ExposureSearch.begin(self.instance, assignment)
        for node in range(self.instance.problem.num_nodes):
            if node in moved or node in self.pinned_nodes:
                continue
            candidate = move_to_deficit(self.instance, assignment, node)
            left = candidate.deficit(self.instance)
            if left < deficit:
                old, new = assignment.span(node), candidate.span(node)
                load = len(new) - max(0, min(old.end, new.end) - max(old.start, new.start))
                exposed = exposures.exposed_after(node, new) if exposures else 0
                found.append(((left, exposed, load, node), candidate))
        for (*_, node), candidate in sorted(found, key=lambda each: each[0]):
            yield node, candidate

    def _gaining_assignments(
        self, now: Assignment, before: PlacementScore
    ) -> Iterator[tuple[Assignment, list[int]]]:
        """Candidate assignments a few moves away, each with the nodes that move."""
        limit = self.policy.max_moves
        if self.goal == "throughput":
            wider = balance_throughput(self.instance, now, max_moves=limit)
            yield wider, _changed_nodes(now, wider)
            return
        for chain in self._chains():
            assignment = now
            for visit in chain:
                assignment = _with_span_covering(self.instance, assignment, visit)
            moving = _changed_nodes(now, assignment)
            if 0 < len(moving) <= limit:
                yield assignment, moving
        assignment, score, moving = now, before, list[int]()
        while len(moving) < limit:
            step = self._best_single(assignment, score, moving)
            if step is None:
                break
            assignment, score, node = step
            moving.append(node)
            yield assignment, list(moving)

    def _chains(self) -> Iterator[Chain]:
        """Candidate chains whose nodes would have to move to the spans they run."""
        if self.start is not None:
            for client in range(len(self.instance.client_problems)):
                yield best_chain(self.instance.chain_problem(self.start, client)) or ()
        if self.start is None or self.instance.problem.num_nodes <= MAX_PIPELINE_SEARCH_NODES:
            yield from Pipelines(self.instance).first(2 * len(self.instance.client_problems))

    def _best_single(
        self, assignment: Assignment, score: PlacementScore, moved: Sequence[int]
    ) -> tuple[Assignment, PlacementScore, int] | None:
        """The move of one more node that saves most latency.

        Candidate spans are those that a node would run if it held all blocks.
        """
        best: tuple[Assignment, PlacementScore, int] | None = None
        everyone = np.arange(self.instance.problem.num_nodes)
        few = max(4, min(_MAX_SINGLE_MOVES, 15_000 // max(len(everyone), 1)))
        for node in rank_nodes(self.instance, everyone)[:few].tolist():
            if node in moved or node in self.pinned_nodes:
                continue
            everywhere = assignment.with_span(node, Span(0, self.instance.problem.num_blocks))
            for candidate in self._used_spans(assignment, everywhere, node):
                found = score_assignment(self.instance, candidate)
                if found.deficit > score.deficit:
                    continue
                least_s = (best[1] if best else score).latency_s
                if found.latency_s < least_s * (1 - _MIN_STEP_GAIN):
                    best = (candidate, found, node)
        return best

    def _used_spans(
        self, assignment: Assignment, everywhere: Assignment, node: int
    ) -> Iterator[Assignment]:
        seen = {assignment.span(node)}
        for client in range(len(self.instance.client_problems)):
            chain = best_chain(self.instance.chain_problem(everywhere, client)) or ()
            for visit in chain:
                if visit.node != node:
                    continue
                candidate = _with_span_covering(self.instance, assignment, visit)
                if candidate.span(node) not in seen:
                    seen.add(candidate.span(node))
                    yield candidate

    def _waves_by_node(
        self, now: Assignment, after: Assignment, moving: Sequence[int]
    ) -> dict[int, int]:
        """The wave number of each node that can move safely."""
        serving = {node.peer_id for node in self.snapshot.nodes}
        ready = frozenset(
            row for row, peer in enumerate(self.instance.problem.peers) if peer in serving
        )
        broken = now.deficit(self.instance).holes > 0
        blocks = self.instance.problem.num_blocks
        waves = schedule_waves(
            blocks,
            now,
            after,
            moving,
            ready=ready,
            broken=broken,
            fixed_B=self.instance.others.holders_B,
        )
        return {node: number for number, wave in enumerate(waves) for node in wave}

    def _make_plan(
        self,
        now: Assignment,
        after: Assignment,
        moving: Sequence[int],
        trigger: MoveReason,
        before: PlacementScore,
        refused: str,
    ) -> RebalancePlan:
        wave_of = self._waves_by_node(now, after, moving)
        ordered = sorted(wave_of, key=lambda node: (wave_of[node], moving.index(node)))
        states = {node.peer_id: node for node in (*self.snapshot.nodes, *self.snapshot.joining)}
        assignment, score = now, before
        moves = []
        for node in ordered:
            assignment = assignment.with_span(node, after.span(node))
            then = score_assignment(self.instance, assignment)
            peer = self.instance.problem.peers[node]
            load_bytes, load_s, cache_tokens, hand_over_s = move_cost(
                states[peer], now.span(node), after.span(node), self.costs
            )
            moves.append(
                PlannedMove(
                    peer_id=peer,
                    before=now.span(node),
                    after=after.span(node),
                    reason=trigger,
                    gain=relative_gain(score, then, self.goal),
                    load_bytes=load_bytes,
                    load_s=load_s,
                    cache_tokens=cache_tokens,
                    hand_over_s=hand_over_s,
                    wave=wave_of[node],
                )
            )
            score = then
        away = {node: move.away_s for node, move in zip(ordered, moves, strict=True)}
        return RebalancePlan(
            goal=self.goal,
            trigger=trigger,
            moves=tuple(moves),
            before=before,
            after=score,
            cost_s=swarm_seconds_lost(self.instance, away),
            refused=refused,
        )


def _with_span_covering(
    instance: PlacementProblem, assignment: Assignment, visit: Visit
) -> Assignment:
    """`assignment` with the visit's node moved by the least distance that covers the visit.

    If the visit does not fit, its beginning is covered.
    """
    here = assignment.span(visit.node)
    most = int(instance.max_blocks_N[visit.node])
    end = min(visit.end, visit.start + most)
    if here.start <= visit.start and end <= here.end:
        return assignment
    start = min(max(here.start, end - most, 0), visit.start, instance.problem.num_blocks - most)
    return assignment.with_span(visit.node, Span(start, start + most))


def _changed_nodes(before: Assignment, after: Assignment) -> list[int]:
    differs_N = (before.starts_N != after.starts_N) | (before.ends_N != after.ends_N)
    changed: list[int] = np.flatnonzero(differs_N).tolist()
    return changed
