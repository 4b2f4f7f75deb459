"""Moves from one assignment to another: their costs, and an order that loses no coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from nesa_node.core.arrays import Ints
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.placement.placement_problem import Assignment, PlacementProblem
from nesa_node.routing.placement.score import Goal, PlacementScore
from nesa_node.topology.snapshot import NodeState

MoveReason = Literal["hole", "replicas", "ahead", "gain", "spread", "none"]
"""Blocks without a holder; missing replicas; blocks that soon lose all holders; a lower cost;
blocks exposed to a failure domain."""

MAX_SPREAD_COST = 0.05
"""Largest share by which spreading holders over failure domains may raise latency, and the time
between steps of the whole swarm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """Costs of loading blocks and handing sessions over.

    `block_bytes`: size of a block as loaded. `cache_bytes`: size of one token's cache in one block.
    `restart_s`: fixed time per move.
    """

    block_bytes: float = 1.0e9
    load_bytes_per_s: float = 1.0e8
    cache_bytes: float = 4096.0
    hand_over_bytes_per_s: float = 1.25e7
    restart_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """The move of one node from the span `before` to `after` (either may be empty).

    Moves of one `wave` may run concurrently, after the wave before. `gain`: share of the goal's
    cost that this move saves after the moves before it, 0 for repairs. The node is away for
    `load_s` (for `load_bytes`) plus `hand_over_s` (for `cache_tokens` of sessions).
    """

    peer_id: PeerId
    before: Span
    after: Span
    reason: MoveReason
    gain: float
    load_bytes: float
    load_s: float
    cache_tokens: int
    hand_over_s: float
    wave: int

    @property
    def away_s(self) -> float:
        return self.load_s + self.hand_over_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePlan:
    """The moves to make now and their trigger, or why there are none.

    `gain`: share of the goal's cost that all moves save, inf if there was no chain before.
    `cost_s`: seconds of the whole swarm's work lost to the moves. `refused`: text on what was found
    but not planned; empty if there is nothing. `forecast`: the blocks that moves ahead are for.
    """

    goal: Goal
    trigger: MoveReason
    moves: tuple[PlannedMove, ...]
    before: PlacementScore
    after: PlacementScore
    cost_s: float
    refused: str = ""
    forecast: str = ""

    @property
    def gain(self) -> float:
        return relative_gain(self.before, self.after, self.goal)

    @property
    def spreads(self) -> bool:
        """Whether fewer blocks are exposed to a failure domain, at little cost."""
        return self.after.exposed < self.before.exposed and costs_little(self.before, self.after)

    def describe_spread(self) -> str:
        before, after = self.before.exposed, self.after.exposed
        return f"exposures of blocks to failure domains: {before} before, {after} after"

    @property
    def payback_s(self) -> float:
        """Seconds until the gain exceeds the cost of moving; inf if it never does."""
        return self.cost_s / self.gain if self.gain > 0 else np.inf


def costs_little(before: PlacementScore, after: PlacementScore) -> bool:
    """Whether neither cost rises by more than `MAX_SPREAD_COST`, as moves that spread must not."""
    goals: tuple[Goal, ...] = ("latency", "throughput")
    return all(after.cost(goal) <= before.cost(goal) * (1 + MAX_SPREAD_COST) for goal in goals)


def relative_gain(before: PlacementScore, after: PlacementScore, goal: Goal) -> float:
    """The share of the cost that `after` saves; inf if only `after` has a chain."""
    was, now = before.cost(goal), after.cost(goal)
    if was == np.inf:
        return np.inf if now < np.inf else 0.0
    return 1.0 - now / was


def move_cost(
    node: NodeState, before: Span, after: Span, costs: MoveCosts
) -> tuple[float, float, int, float]:
    """Bytes and seconds to load, then tokens of cache and seconds to hand over."""
    kept = max(0, min(before.end, after.end) - max(before.start, after.start))
    load_bytes = (len(after) - kept) * costs.block_bytes
    cache_tokens = max(node.total_cache_tokens - node.free_cache_tokens, 0)
    cache_bytes = cache_tokens * costs.cache_bytes * len(before)
    load_s = load_bytes / costs.load_bytes_per_s + costs.restart_s
    return load_bytes, load_s, cache_tokens, cache_bytes / costs.hand_over_bytes_per_s


def describe_lost(
    instance: PlacementProblem, assignment: Assignment, leaving: Mapping[int, float]
) -> str:
    """The blocks that lose all holders with the `leaving` nodes, and when (seconds since the epoch)
    the last of these leaves: the longest run of blocks with as many holders."""
    blocks = instance.problem.num_blocks
    holders_B = assignment.count_holders_B(blocks) + instance.others.holders_B
    staying_B = assignment.without(leaving).count_holders_B(blocks) + instance.others.holders_B
    until_B = np.zeros(blocks)
    for node, at_s in leaving.items():
        span = assignment.span(node)
        until_B[span.start : span.end] = np.maximum(until_B[span.start : span.end], at_s)
    lost = np.flatnonzero((holders_B > 0) & (staying_B == 0)).tolist()
    runs: list[Span] = []
    for block in lost:
        if runs and runs[-1].end == block and holders_B[block - 1] == holders_B[block]:
            runs[-1] = Span(runs[-1].start, block + 1)
        else:
            runs.append(Span(block, block + 1))
    if not runs:
        return ""
    first = max(runs, key=len)
    count, at_s = holders_B[first.start], until_B[first.start : first.end].max()
    when = datetime.fromtimestamp(at_s, UTC)
    more = f", {len(lost) - len(first)} more blocks theirs" if len(lost) > len(first) else ""
    return f"blocks {first} lose {count} of {count} holders about {when:%H:%M} UTC{more}"


def swarm_seconds_lost(instance: PlacementProblem, nodes: Mapping[int, float]) -> float:
    """Seconds of the whole swarm's work lost while `nodes` are away for the given seconds."""
    rate_N = instance.blocks_per_s_N
    total = float(rate_N.sum() + instance.others.speed_SE.sum())
    lost = sum(float(rate_N[node]) * away_s for node, away_s in nodes.items())
    return lost / total if total > 0 else 0.0


def schedule_waves(
    num_blocks: int,
    before: Assignment,
    after: Assignment,
    moving: Sequence[int],
    *,
    ready: frozenset[int],
    broken: bool,
    fixed_B: Ints | None = None,
) -> list[list[int]]:
    """The nodes of `moving` in waves, each as early as is safe; nodes that never are, are left out.

    Make before break: a moving node counts as away, and every block of its old span needs a ready
    node that stays. Only in a `broken` swarm, which has no complete chain anyway, the blocks that a
    node keeps may be unavailable while it loads. `fixed_B`: ready holders beside these nodes.
    """
    waves: list[list[int]] = []
    left, assignment = list(moving), before
    while left:
        holders_B = _ready_holders(num_blocks, assignment, ready)
        if fixed_B is not None:
            holders_B = holders_B + fixed_B
        wave: list[int] = []
        for node in left:
            here = slice(int(assignment.starts_N[node]), int(assignment.ends_N[node]))
            needed_B = np.zeros(num_blocks, dtype=np.int64)
            needed_B[here] = 1
            if broken:
                needed_B[int(after.starts_N[node]) : int(after.ends_N[node])] = 0
            away_B = np.zeros(num_blocks, dtype=np.int64)
            away_B[here] = node in ready
            if ((holders_B - away_B)[needed_B > 0] >= 1).all():
                holders_B -= away_B
                wave.append(node)
        if not wave:
            break
        for node in wave:
            assignment = assignment.with_span(node, after.span(node))
        ready |= frozenset(wave)
        waves.append(wave)
        left = [node for node in left if node not in wave]
    return waves


def _ready_holders(num_blocks: int, assignment: Assignment, ready: frozenset[int]) -> np.ndarray:
    nodes = np.array(sorted(ready), dtype=np.int64)
    return Assignment(assignment.starts_N[nodes], assignment.ends_N[nodes]).count_holders_B(
        num_blocks
    )
