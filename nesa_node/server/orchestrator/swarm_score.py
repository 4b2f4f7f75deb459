"""How good the spans of a swarm's nodes are, before and after moves: what followers judge by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.placement_problem import make_placement_problem
from nesa_node.routing.placement.score import score_assignment
from nesa_node.swarm.dht.sealing import AnnouncedMove
from nesa_node.topology.snapshot import NodeState, Snapshot

REPLICAS = 2


@dataclass(frozen=True, slots=True)
class SwarmScore:
    holes: int
    """Blocks without a holder."""
    missing_replicas: int
    """Holders missing to have `REPLICAS` of each block."""
    latency_s: float
    """Seconds per step."""
    steps_per_s: float
    """Steps per second of the whole swarm."""
    exposed: int
    """Pairs of a block and a failure domain that contains all of its holders."""


ScoreSwarm = Callable[[Snapshot], SwarmScore]
"""Scores the serving nodes of a snapshot."""


def apply_moves(snapshot: Snapshot, moves: Iterable[AnnouncedMove]) -> Snapshot:
    """The swarm after the moves that still start from their nodes' spans."""
    spans = {move.peer: move.span for move in moves if is_applicable(snapshot, move)}
    return replace(
        snapshot,
        nodes=tuple(node.with_span(spans.get(node.peer_id, node.span)) for node in snapshot.nodes),
    )


def is_applicable(snapshot: Snapshot, move: AnnouncedMove) -> bool:
    node = snapshot.find_node(PeerId(move.peer))
    return node is not None and node.span == move.previous_span


def stays_covered(snapshot: Snapshot, own: NodeState, span: Span) -> bool:
    """Whether every block that `own` gives up for `span` keeps a holder."""
    coverage = snapshot.without_peers(own.peer_id).coverage()
    given_up = set(range(own.span.start, own.span.end)) - set(range(span.start, span.end))
    return all(coverage[block] > 0 for block in given_up if block < len(coverage))


def savings(before: SwarmScore, after: SwarmScore) -> tuple[float, float]:
    """Shares saved of the time of a step, and of the time between steps."""
    return (
        _saved_fraction(before.latency_s, after.latency_s),
        _saved_fraction(_inverse(before.steps_per_s), _inverse(after.steps_per_s)),
    )


def _saved_fraction(before: float, after: float) -> float:
    if not math.isfinite(before):
        return 0.0 if not math.isfinite(after) else 1.0
    return 1.0 - after / before if before > 0 else 0.0


def _inverse(rate: float) -> float:
    return 1.0 / rate if rate > 0 else math.inf


def score_swarm(snapshot: Snapshot) -> SwarmScore:
    """Score the serving nodes as planners do."""
    serving = replace(snapshot, joining=())
    coverage = serving.coverage()
    holes = sum(count == 0 for count in coverage)
    thin = sum(max(REPLICAS - count, 0) for count in coverage)
    if not serving.nodes or serving.num_blocks < 1:
        return SwarmScore(holes, thin, math.inf, 0.0, 0)
    room = make_placement_problem(serving, ChainRequest(span=Span(0, serving.num_blocks)))
    score = score_assignment(room, room.current_assignment())
    return SwarmScore(holes, thin, score.latency_s, score.steps_per_s, score.exposed)
