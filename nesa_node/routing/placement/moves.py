"""Moves from one layout to another: what each costs, and an order in which nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.placement.room import Layout, Room
from nesa_node.routing.placement.score import Goal, Score
from nesa_node.topology.snapshot import NodeState

Trigger = Literal["hole", "replicas", "gain", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What it takes to load blocks and to hand sessions over.

    `block_bytes` on disk or in the network, `cache_bytes` of one token in one block, `restart_s`
    beside both.
    """

    block_bytes: float = 1.0e9
    load_bytes_per_s: float = 1.0e8
    cache_bytes: float = 4096.0
    hand_over_bytes_per_s: float = 1.25e7
    restart_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One node gives up `before` and takes `after` (either may be empty).

    Moves of one `wave` may run at once, each wave when the one before is done. `gain`: the share of
    the goal's cost that this move saves after those before it, 0 where it mends a loss. `load_s`
    and `hand_over_s`: how long the node is away, for `load_bytes` and `cache_tokens` of sessions.
    """

    peer_id: PeerId
    before: Span
    after: Span
    reason: Trigger
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
class Moves:
    """What should move now, and why, or why nothing should.

    `gain` is the share of the goal's cost that all moves save, inf where there was no chain at all.
    `cost_s`: seconds of the whole swarm's work that the moves take away. `refused` says in words
    what was found and not done; empty if there was nothing better or all of it is done.
    """

    goal: Goal
    trigger: Trigger
    moves: tuple[Move, ...]
    before: Score
    after: Score
    cost_s: float
    refused: str = ""

    @property
    def gain(self) -> float:
        return saving(self.before, self.after, self.goal)

    @property
    def pays_back_s(self) -> float:
        """How long until what was gained exceeds what moving took; inf if it never does."""
        return self.cost_s / self.gain if self.gain > 0 else np.inf


def saving(before: Score, after: Score, goal: Goal) -> float:
    """The share of the cost that `after` saves; inf if there was no chain before and is one now."""
    was, now = before.cost(goal), after.cost(goal)
    if was == np.inf:
        return np.inf if now < np.inf else 0.0
    return 1.0 - now / was


def price(
    node: NodeState, before: Span, after: Span, costs: MoveCosts
) -> tuple[float, float, int, float]:
    """Bytes and seconds to load, tokens of cache and seconds to hand over."""
    kept = max(0, min(before.end, after.end) - max(before.start, after.start))
    load_bytes = (len(after) - kept) * costs.block_bytes
    cache_tokens = max(node.total_cache_tokens - node.free_cache_tokens, 0)
    cache_bytes = cache_tokens * costs.cache_bytes * len(before)
    load_s = load_bytes / costs.load_bytes_per_s + costs.restart_s
    return load_bytes, load_s, cache_tokens, cache_bytes / costs.hand_over_bytes_per_s


def share_away_s(room: Room, nodes: Mapping[int, float]) -> float:
    """Seconds of the whole swarm's work that are lost while those nodes are away so long."""
    rate_N = room.blocks_per_s_N
    total = float(rate_N.sum())
    lost = sum(float(rate_N[node]) * away_s for node, away_s in nodes.items())
    return lost / total if total > 0 else 0.0


def in_waves(
    num_blocks: int,
    before: Layout,
    after: Layout,
    moving: Sequence[int],
    *,
    ready: frozenset[int],
    broken: bool,
) -> list[list[int]]:
    """The nodes of `moving` in waves, as early as it is safe, without those who never safely can.

    Make before break: while a node moves it counts as away, and every block of its old span needs a
    node that is ready and stays. Only in a swarm that is `broken`, where no chain is whole anyway,
    blocks that a node keeps may be away for as long as it loads.
    """
    waves: list[list[int]] = []
    left, layout = list(moving), before
    while left:
        holders_B = _ready_holders(num_blocks, layout, ready)
        wave: list[int] = []
        for node in left:
            here = slice(int(layout.starts_N[node]), int(layout.ends_N[node]))
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
            layout = layout.moved(node, after.span(node))
        ready |= frozenset(wave)
        waves.append(wave)
        left = [node for node in left if node not in wave]
    return waves


def _ready_holders(num_blocks: int, layout: Layout, ready: frozenset[int]) -> np.ndarray:
    nodes = np.array(sorted(ready), dtype=np.int64)
    return Layout(layout.starts_N[nodes], layout.ends_N[nodes]).holders_B(num_blocks)
