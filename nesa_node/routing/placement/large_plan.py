"""Placements of many thousand nodes: candidates come branch by branch of the merge tree.

The planners of this folder need the links of all pairs, which do not fit for more than some
thousand nodes. Here they see the nodes that could serve the clients with least latency: the
cheapest of the branches that are nearest to them. All other nodes fill their own branch where that
holds the model, so that each region can serve its clients, and else the whole swarm. They are known
to the planners by what they hold (`FixedHolders`).

N nodes, G branches, B blocks, D failure domains, C clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import Hop, chain_cost_s
from nesa_node.routing.large_swarm import LargeSwarm, choose_candidates, plan_large_chain
from nesa_node.routing.placement.moves import MoveCosts, RebalancePlan
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    FixedHolders,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.plan import (
    PlacementPlan,
    SwarmPerformance,
    WhatIfResult,
    WhatIfSettings,
    describe_plan,
    find_assignment,
)
from nesa_node.routing.placement.rebalance import RebalancePolicy, rebalance_problem
from nesa_node.routing.placement.recipes import BlockCoverage, fill_one
from nesa_node.routing.placement.score import Goal, flow_bound, score_assignment

MAX_PLAN_CANDIDATES = 256
"""Nodes that planners place with regard to links."""
_COPIES = 16
"""Copies of the model that the candidates of one branch hold."""


@dataclass(frozen=True, slots=True, eq=False)
class _Capacity:
    """Blocks that fit on each node, and blocks/s of each, [N]."""

    most_N: Ints
    rate_N: Floats


def plan_large_placement(
    swarm: LargeSwarm,
    requests: Sequence[ChainRequest],
    *,
    goal: Goal = "latency",
    replicas: int = 2,
    candidates: Ints | None = None,
) -> PlacementPlan:
    """A placement of all serving nodes of `swarm`, regardless of their present spans.

    As `plan_placement`, but that latency is that of chains among `candidates` (by default those of
    `choose_plan_candidates`), and that its bound ignores transfers between nodes.
    """
    capacity = _capacity(swarm)
    rows = choose_plan_candidates(swarm, requests) if candidates is None else candidates
    others = np.setdiff1d(np.arange(len(swarm.links)), rows)
    filled = _fill_branches(swarm, capacity, others, replicas)
    instance = _candidate_problem(swarm, requests, rows, others, filled, capacity, replicas)
    assignment, score, method = find_assignment(instance, goal)
    plan = describe_plan(swarm.restrict(rows), instance, goal, assignment, score, method)
    spans = {
        swarm.links.peers[row]: filled.span(row)
        for row in others.tolist()
        if filled.ends_N[row] > filled.starts_N[row]
    }
    if goal == "throughput":
        bound = flow_bound(capacity.most_N, capacity.rate_N, swarm.snapshot.num_blocks)
    else:
        bound = _latency_bound_s(swarm, capacity, requests)
    return replace(
        plan,
        spans=MappingProxyType({**spans, **plan.spans}),
        bound=bound,
        method=f"{method}, {len(rows)} of {len(swarm.links)} nodes by branches",
    )


def rebalance_large(
    swarm: LargeSwarm,
    requests: Sequence[ChainRequest],
    *,
    goal: Goal = "latency",
    replicas: int = 2,
    policy: RebalancePolicy | None = None,
    costs: MoveCosts | None = None,
    most: int = MAX_PLAN_CANDIDATES,
) -> RebalancePlan:
    """`rebalance`, where only candidates move: holders for the clients' present chains, and nodes
    that would be placed for them."""
    capacity = _capacity(swarm)
    used = [choose_candidates(swarm, request, most // (2 * len(requests))) for request in requests]
    rows = np.unique(np.concatenate([*used, choose_plan_candidates(swarm, requests, most // 2)]))
    others = np.setdiff1d(np.arange(len(swarm.links)), rows)
    now = Assignment(swarm.starts_N, swarm.ends_N)
    instance = _candidate_problem(swarm, requests, rows, others, now, capacity, replicas)
    snapshot = swarm.restrict(rows)
    return rebalance_problem(snapshot, instance, goal=goal, policy=policy, costs=costs)


def study_large_change(
    swarm: LargeSwarm, changed: LargeSwarm, question: WhatIfSettings
) -> WhatIfResult:
    """`study_change` for swarms of many thousand nodes, which all have a span."""
    goal, replicas, requests = question.goal, question.replicas, question.requests
    moves = rebalance_large(
        changed,
        requests,
        goal=goal,
        replicas=replicas,
        policy=question.policy,
        costs=question.costs,
    )
    placement = plan_large_placement(changed, requests, goal=goal, replicas=replicas)
    settled = changed.with_spans({move.peer_id: move.after for move in moves.moves}, requests[0])
    best = changed.with_spans(placement.spans, requests[0])
    return WhatIfResult(
        before=measure_large_swarm(swarm, question),
        changed=measure_large_swarm(changed, question),
        settled=measure_large_swarm(settled, question),
        best=measure_large_swarm(best, question),
        moves=moves,
        placement=placement,
    )


def measure_large_swarm(swarm: LargeSwarm, question: WhatIfSettings) -> SwarmPerformance:
    """`measure_swarm`, with chains of candidates."""
    capacity, everything = _capacity(swarm), np.arange(len(swarm.links))
    held = Assignment(swarm.starts_N, swarm.ends_N)
    no_nodes = np.zeros(0, dtype=np.int64)
    chains: list[tuple[Hop, ...]] = []
    latencies_s: list[float] = []
    for request in question.requests:
        try:
            hops = plan_large_chain(swarm, request, choose=question.strategy)
        except MissingBlocksError:
            chains.append(())
            latencies_s.append(np.inf)
            continue
        rows = np.array([swarm.row_of[hop.peer_id] for hop in hops])
        asked = swarm.restrict_request(request, rows)
        chains.append(hops)
        latencies_s.append(chain_cost_s(swarm.restrict(rows), asked, hops))
    room = _candidate_problem(
        swarm, question.requests[:1], no_nodes, everything, held, capacity, question.replicas
    )
    score = score_assignment(room, room.current_assignment())
    return SwarmPerformance(
        snapshot=swarm.snapshot,
        latency_s=float(np.mean(latencies_s)),
        steps_per_s=score.steps_per_s,
        chain=chains[0],
        deficit=score.deficit,
        exposed=score.exposed,
    )


def _capacity(swarm: LargeSwarm) -> _Capacity:
    nodes, blocks = swarm.snapshot.nodes, swarm.snapshot.num_blocks
    most_N = np.array([min(node.max_blocks or len(node.span), blocks) for node in nodes])
    reliability_N = np.array([node.reliability for node in nodes])
    return _Capacity(most_N, reliability_N / np.maximum(swarm.block_s_N, 1e-12))


def choose_plan_candidates(
    swarm: LargeSwarm, requests: Sequence[ChainRequest], most: int = MAX_PLAN_CANDIDATES
) -> Ints:
    """The nodes that could serve the clients with least latency, ascending.

    For each client the branches follow by the way to them and back and the time of all blocks on
    the branch's cheapest nodes; of each the cheapest that hold the model `_COPIES` times are taken.
    """
    capacity, blocks = _capacity(swarm), swarm.snapshot.num_blocks
    cost_s_N = swarm.busy_block_s_N + swarm.visit_s_N / np.maximum(capacity.most_N, 1)
    order = np.lexsort((cost_s_N, swarm.branch_N))
    order = order[capacity.most_N[order] > 0]
    members_G = np.split(order, np.flatnonzero(np.diff(swarm.branch_N[order])) + 1)
    listed_G, work_s_G = [], []
    for members in members_G:
        held = np.cumsum(capacity.most_N[members])
        listed_G.append(members[: int(np.searchsorted(held, _COPIES * blocks)) + 1])
        runs = np.diff(np.minimum(held, blocks), prepend=0)
        missing = blocks - int(runs.sum())
        work_s_G.append(float((runs * cost_s_N[members]).sum() + missing * cost_s_N[members[-1]]))
    chosen: set[int] = set()
    for number, request in enumerate(requests, 1):
        away_s_N = swarm.away_s_N(request)
        bound_s_G = [
            float(away_s_N[members].min()) + work_s
            for members, work_s in zip(members_G, work_s_G, strict=True)
        ]
        for group in np.argsort(bound_s_G, kind="stable").tolist():
            chosen.update(listed_G[group].tolist())
            if len(chosen) >= most * number // len(requests):
                break
    return np.array(sorted(chosen), dtype=np.int64)


def _fill_branches(
    swarm: LargeSwarm, capacity: _Capacity, nodes: Ints, replicas: int
) -> Assignment:
    """Spans of `nodes`, the largest first; other nodes get none.

    A branch whose nodes hold the model is filled by itself; what remains fills the whole swarm.
    """
    blocks = swarm.snapshot.num_blocks
    starts_N = np.zeros(len(swarm.links), dtype=np.int64)
    ends_N = np.zeros(len(swarm.links), dtype=np.int64)
    whole = BlockCoverage.empty(blocks)
    nodes = nodes[np.lexsort((-capacity.rate_N[nodes], -capacity.most_N[nodes]))]
    rest: list[int] = []
    for branch in range(int(swarm.branch_N.max(initial=-1)) + 1):
        members = nodes[swarm.branch_N[nodes] == branch].tolist()
        if int(capacity.most_N[members].sum()) < blocks:
            rest.extend(members)
            continue
        coverage = BlockCoverage.empty(blocks)
        for node in members:
            width, rate = int(capacity.most_N[node]), float(capacity.rate_N[node])
            starts_N[node] = fill_one(coverage, width, rate, replicas)
            ends_N[node] = starts_N[node] + width
        whole.holders_B += coverage.holders_B
        whole.speed_B += coverage.speed_B
    for node in rest:
        width, rate = int(capacity.most_N[node]), float(capacity.rate_N[node])
        starts_N[node] = fill_one(whole, width, rate, replicas)
        ends_N[node] = starts_N[node] + width
    return Assignment(starts_N, ends_N)


def _candidate_problem(
    swarm: LargeSwarm,
    requests: Sequence[ChainRequest],
    rows: Ints,
    others: Ints,
    held: Assignment,
    capacity: _Capacity,
    replicas: int,
) -> PlacementProblem:
    """The placement problem of the nodes `rows`; `others` keep the spans of `held`."""
    snapshot = swarm.restrict(rows)
    asked = [swarm.restrict_request(request, rows) for request in requests]
    instance = make_placement_problem(snapshot, asked, replicas=replicas)
    domains_DN = swarm.domains_DN
    blocks = swarm.snapshot.num_blocks
    kept = Assignment(held.starts_N[others], held.ends_N[others])
    holds_NB = kept.holds_NB(blocks).astype(np.float32)
    speed_SE = np.zeros((blocks + 1, blocks + 1))
    np.add.at(speed_SE, (kept.starts_N, kept.ends_N), capacity.rate_N[others])
    np.fill_diagonal(speed_SE, 0.0)
    inside_DB = (domains_DN[:, others].astype(np.float32) @ holds_NB).astype(np.int64)
    fixed = FixedHolders(kept.count_holders_B(blocks), inside_DB, speed_SE)
    return replace(instance, domains_DN=domains_DN[:, rows], fixed=fixed)


def _latency_bound_s(
    swarm: LargeSwarm, capacity: _Capacity, requests: Sequence[ChainRequest]
) -> float:
    """Lower bound on the mean latency: no transfers between nodes, blocks on the fastest nodes."""
    blocks = swarm.snapshot.num_blocks
    fastest = np.argsort(swarm.busy_block_s_N, kind="stable")
    filled = np.minimum(np.cumsum(capacity.most_N[fastest]), blocks)
    if not len(filled) or filled[-1] < blocks:
        return np.inf
    work_s = float((np.diff(filled, prepend=0) * swarm.busy_block_s_N[fastest]).sum())
    ways_s = [float(swarm.away_s_N(request).min()) for request in requests]
    return work_s + float(np.mean(ways_s)) + requests[0].visit_s
