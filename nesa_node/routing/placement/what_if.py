"""What-if analysis: the effect of joins and losses on a swarm, with the live planners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.chains import Hop
from nesa_node.routing.exact import exact_latency
from nesa_node.routing.placement.capacity import make_room
from nesa_node.routing.placement.fill import Water, fill
from nesa_node.routing.placement.moves import MoveCosts, Moves
from nesa_node.routing.placement.plan import Placement, best_layout, describe, hops
from nesa_node.routing.placement.rebalance import Policy, rebalance
from nesa_node.routing.placement.room import Lacks, Room
from nesa_node.routing.placement.score import Goal, measure
from nesa_node.routing.problem import Chain, Problem, terms
from nesa_node.topology.snapshot import NodeState, Snapshot

Strategy = Callable[[Problem], Chain]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Settings of an analysis: requests (one per client), goal, strategy and costs of moves."""

    requests: Sequence[Request]
    goal: Goal = "latency"
    replicas: int = 2
    strategy: Strategy = exact_latency
    policy: Policy = field(default_factory=Policy)
    costs: MoveCosts = field(default_factory=MoveCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A swarm and its performance; `latency_s` is the mean over clients, `chain` the first's."""

    snapshot: Snapshot
    latency_s: float
    steps_per_s: float
    chain: tuple[Hop, ...]
    lacks: Lacks

    @property
    def coverage(self) -> tuple[int, ...]:
        return self.snapshot.coverage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The swarm before the change, after it, after the moves that follow, and optimally placed."""

    before: Stage
    changed: Stage
    settled: Stage
    best: Stage
    moves: Moves
    placement: Placement


def study(snapshot: Snapshot, changed: Snapshot, question: Question) -> Answer:
    """Compare `snapshot` with `changed`; every node has a span already (see `take_spans`)."""
    moves = rebalance(
        changed,
        question.requests,
        goal=question.goal,
        replicas=question.replicas,
        policy=question.policy,
        costs=question.costs,
    )
    after = hold(changed, {move.peer_id: move.after for move in moves.moves})
    room = make_room(changed, question.requests, replicas=question.replicas)
    layout, score, method = best_layout(room, question.goal)
    placement = describe(changed, room, question.goal, layout, score, method)
    return Answer(
        before=stage(snapshot, question),
        changed=stage(changed, question),
        settled=stage(after, question),
        best=stage(hold(changed, placement.spans), question),
        moves=moves,
        placement=placement,
    )


def stage(snapshot: Snapshot, question: Question) -> Stage:
    room = make_room(snapshot, question.requests, replicas=question.replicas)
    score = measure(room, room.now())
    chains = [_chain(room, question.strategy, client) for client in range(len(room.clients))]
    latencies_s = [
        np.inf if chain is None else terms(room.clients[client], chain).total_s
        for client, chain in enumerate(chains)
    ]
    return Stage(
        snapshot=snapshot,
        latency_s=float(np.mean(latencies_s)),
        steps_per_s=score.steps_per_s,
        chain=hops(room, chains[0] or ()),
        lacks=score.lacks,
    )


def _chain(room: Room, strategy: Strategy, client: int) -> Chain | None:
    try:
        return strategy(room.clients[client])
    except MissingBlocksError:
        return None


def take_spans(snapshot: Snapshot, question: Question) -> Snapshot:
    """Assign spans to nodes without one, as joining nodes would; plan all if no node has one."""
    room = make_room(snapshot, question.requests, replicas=question.replicas)
    problem = room.problem
    empty_N = problem.ends_N <= problem.starts_N
    if not empty_N.any():
        return snapshot
    if empty_N.all():
        layout, _, _ = best_layout(room, question.goal)
        spans = {peer: layout.span(node) for node, peer in enumerate(problem.peers)}
        return hold(snapshot, spans)
    water = Water.none(problem.num_blocks)
    rate_N = room.blocks_per_s_N
    for node in np.flatnonzero(~empty_N).tolist():
        start, end = int(problem.starts_N[node]), int(problem.ends_N[node])
        water.pour(start, end - start, float(rate_N[node]))
    starts_N = problem.starts_N.copy()
    newcomers = sorted(np.flatnonzero(empty_N).tolist(), key=lambda node: -int(room.most_N[node]))
    fill(room, starts_N, water, newcomers)
    spans = {
        problem.peers[node]: Span(int(starts_N[node]), int(starts_N[node] + room.most_N[node]))
        for node in newcomers
    }
    return hold(snapshot, spans)


def hold(snapshot: Snapshot, spans: Mapping[PeerId, Span]) -> Snapshot:
    """`snapshot` with the given spans, at the same speed per block."""
    return replace(
        snapshot,
        nodes=tuple(_holding(node, spans.get(node.peer_id)) for node in snapshot.nodes),
        joining=tuple(_holding(node, spans.get(node.peer_id)) for node in snapshot.joining),
    )


def _holding(node: NodeState, span: Span | None) -> NodeState:
    if span is None or span == node.span:
        return node
    share = max(len(node.span), 1) / max(len(span), 1)
    return replace(
        node,
        span=span,
        prefill_tokens_per_s=node.prefill_tokens_per_s * share,
        decode_tokens_per_s=node.decode_tokens_per_s * share,
    )
