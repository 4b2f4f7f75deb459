"""Search for a low-latency chain through nodes with free spans.

B blocks, K candidates, S senders. With few candidates all subsets are searched (`_through_sets`,
exact). With more, a dynamic program over (blocks done, last node) stores with each state the nodes
visited on its best path and does not revisit them (a heuristic).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nesa_node.routing.placement.bound import nearest_s
from nesa_node.routing.placement.cuts import quickest_cuts
from nesa_node.routing.placement.room import Room
from nesa_node.routing.problem import Chain, Floats, Ints, Visit

MAX_CANDIDATES = 192
MAX_EXACT = 9

Cut = Callable[[Ints, Floats, int], Ints]


def find_pipeline(room: Room, allowed: Ints, nearest_s_N: Floats | None = None) -> Chain | None:
    """A low-latency chain through nodes of `allowed` (indices), each at most once, or None.

    It is optimal for at most `MAX_EXACT` nodes. `nearest_s_N`: result of `bound.nearest_s`, if
    known.
    """
    allowed = allowed[room.most_N[allowed] > 0]
    if int(room.most_N[allowed].sum()) < room.problem.num_blocks:
        return None
    if len(allowed) <= MAX_EXACT:
        nodes = _through_sets(room, allowed)
    else:
        nodes = _through_states(room, promising(room, allowed, nearest_s_N))
    return None if nodes is None else cut_pipeline(room, nodes, quickest_cuts)


def thumb_pipeline(room: Room, allowed: Ints, nearest_s_N: Floats | None = None) -> Chain | None:
    """A heuristic chain: the best-ranked nodes that hold the model, each next one the nearest."""
    best_first = promising(room, allowed, nearest_s_N)
    held = np.cumsum(room.most_N[best_first])
    if not len(held) or held[-1] < room.problem.num_blocks:
        return None
    count = int(np.searchsorted(held, room.problem.num_blocks)) + 1
    left = best_first[: min(count, room.problem.num_blocks)].tolist()
    nodes = [min(left, key=lambda node: float(room.problem.entry_s_N[node]))]
    left.remove(nodes[0])
    while left:
        away_s_N = room.problem.transfer_s_NN[nodes[-1]]
        nodes.append(min(left, key=lambda node: float(away_s_N[node])))
        left.remove(nodes[-1])
    return cut_pipeline(room, nodes, quickest_cuts)


def cut_pipeline(room: Room, nodes: Sequence[int], cut: Cut) -> Chain:
    """The chain through `nodes` in that order, with blocks divided by `cut`."""
    chosen = np.array(nodes)
    lengths = cut(room.most_N[chosen], room.problem.busy_block_s_N[chosen], room.problem.num_blocks)
    ends = np.cumsum(lengths)
    return tuple(
        Visit(node, int(end - length), int(end))
        for node, length, end in zip(nodes, lengths, ends, strict=True)
    )


def promising(room: Room, allowed: Ints, nearest_s_N: Floats | None = None) -> Ints:
    """The nodes of `allowed` ranked by the latency of a chain of nodes like each, best first.

    As many as hold the model twice, but at least `MAX_CANDIDATES`, if there are as many.
    """
    problem = room.problem
    allowed = allowed[room.most_N[allowed] > 0]
    if nearest_s_N is None:
        nearest_s_N = nearest_s(problem.transfer_s_NN)
    blocks, most_N = problem.num_blocks, room.most_N[allowed]
    per_visit_s = problem.visit_s_N[allowed] + nearest_s_N[allowed]
    score_s = (
        blocks * (problem.busy_block_s_N[allowed] + per_visit_s / most_N)
        + problem.entry_s_N[allowed]
        + problem.exit_s_N[allowed]
    )
    best_first = allowed[np.argsort(score_s, kind="stable")]
    needed = int(np.searchsorted(np.cumsum(room.most_N[best_first]), blocks)) + 1
    return best_first[: max(MAX_CANDIDATES, 2 * needed)]


def _through_states(room: Room, candidates: Ints) -> list[int] | None:
    problem = room.problem
    blocks, size = problem.num_blocks, len(candidates)
    most_K = room.most_N[candidates]
    block_s_K = problem.busy_block_s_N[candidates]
    visit_s_K = problem.visit_s_N[candidates]
    transfer_s_KK = problem.transfer_s_NN[np.ix_(candidates, candidates)]
    done_s_BK = np.full((blocks + 1, size), np.inf)
    been_BKK = np.zeros((blocks + 1, size, size), dtype=np.bool_)
    came_BK2 = np.full((blocks + 1, size, 2), -1, dtype=np.int64)
    everyone = np.arange(size)
    for block in range(blocks):
        if block == 0:
            sender_K = np.full(size, -1)
            entered_s_K = problem.entry_s_N[candidates] + visit_s_K
            been_KK = np.eye(size, dtype=np.bool_)
        else:
            senders = np.flatnonzero(np.isfinite(done_s_BK[block]))
            if not len(senders):
                continue
            sums_s_SK = done_s_BK[block, senders, None] + transfer_s_KK[senders]
            sums_s_SK[been_BKK[block, senders]] = np.inf
            sender_K = senders[sums_s_SK.argmin(axis=0)]
            entered_s_K = sums_s_SK.min(axis=0) + visit_s_K
            been_KK = been_BKK[block, sender_K]
            been_KK[everyone, everyone] = True
        counts_C1 = np.arange(1, min(blocks - block, int(most_K.max())) + 1)[:, None]
        cost_s_CK = entered_s_K + counts_C1 * block_s_K
        cost_s_CK[counts_C1 > most_K] = np.inf
        here = slice(block + 1, block + 1 + len(counts_C1))
        more, who = np.nonzero(cost_s_CK < done_s_BK[here])
        done_s_BK[here][more, who] = cost_s_CK[more, who]
        been_BKK[here][more, who] = been_KK[who]
        came_BK2[here][more, who, 0] = block
        came_BK2[here][more, who, 1] = sender_K[who]
    total_s_K = done_s_BK[blocks] + problem.exit_s_N[candidates]
    if not np.isfinite(total_s_K.min()):
        return None
    nodes, at, node = [], blocks, int(total_s_K.argmin())
    while at > 0:
        nodes.append(int(candidates[node]))
        at, node = (int(value) for value in came_BK2[at, node])
    return nodes[::-1]


def _through_sets(room: Room, candidates: Ints) -> list[int] | None:
    """Held-Karp dynamic program over subsets; the compute time of a subset is order-independent."""
    problem = room.problem
    size = len(candidates)
    transfer_s_KK = problem.transfer_s_NN[np.ix_(candidates, candidates)]
    way_s = np.full((1 << size, size), np.inf)
    before = np.full((1 << size, size), -1, dtype=np.int64)
    best_s, best = np.inf, (0, -1)
    for members in range(1, 1 << size):
        inside = np.array([node for node in range(size) if members >> node & 1])
        for node in inside:
            rest = members ^ (1 << int(node))
            if rest == 0:
                way_s[members, node] = problem.entry_s_N[candidates[node]]
                continue
            via_s = way_s[rest] + transfer_s_KK[:, node]
            before[members, node] = via_s.argmin()
            way_s[members, node] = via_s.min()
        chosen = candidates[inside]
        if not len(inside) <= problem.num_blocks <= int(room.most_N[chosen].sum()):
            continue
        block_s = problem.busy_block_s_N[chosen]
        lengths = quickest_cuts(room.most_N[chosen], block_s, problem.num_blocks)
        work_s = float((lengths * block_s).sum() + problem.visit_s_N[chosen].sum())
        total_s = work_s + way_s[members, inside] + problem.exit_s_N[chosen]
        if total_s.min() < best_s:
            best_s = float(total_s.min())
            best = (members, int(inside[total_s.argmin()]))
    if not np.isfinite(best_s):
        return None
    nodes, (members, node) = [], best
    while node >= 0:
        nodes.append(int(candidates[node]))
        members, node = members ^ (1 << node), int(before[members, node])
    return nodes[::-1]
