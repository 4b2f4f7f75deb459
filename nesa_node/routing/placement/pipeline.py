"""Search for a low-latency chain through nodes with free spans.

B blocks, K candidates, P nodes of a pipeline, S senders. With few candidates all subsets are
searched (`_search_subsets`, exact). With more, a dynamic program over (blocks done, last node)
stores with each state the nodes visited on its best path and does not revisit them (a heuristic).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.routing.chain_request import Chain, Visit
from nesa_node.routing.placement.placement_problem import PlacementProblem
from nesa_node.routing.search.minplus import nearest_transfer_s


def quickest_cuts(max_blocks_P: Ints, block_s_P: Floats, num_blocks: int) -> Ints:
    """The numbers of blocks [P] that minimise the time of a step.

    Every node runs at least one block; the rest goes to the fastest nodes, as many as fit. Raises
    `ValueError` if the blocks do not fit, or are fewer than the nodes.
    """
    _check_fit(max_blocks_P, num_blocks)
    lengths_P = np.ones(len(max_blocks_P), dtype=np.int64)
    left = num_blocks - len(max_blocks_P)
    for node in np.argsort(block_s_P, kind="stable"):
        more = min(left, int(max_blocks_P[node]) - 1)
        lengths_P[node] += more
        left -= more
    return lengths_P


def even_cuts(max_blocks_P: Ints, block_s_P: Floats, num_blocks: int) -> Ints:
    """The numbers of blocks [P] that minimise the time of the slowest node.

    Water filling: each block goes to the node with capacity left that would then finish first.
    Raises as `quickest_cuts` does.
    """
    _check_fit(max_blocks_P, num_blocks)
    lengths_P = np.ones(len(max_blocks_P), dtype=np.int64)
    queue = [
        (2 * float(block_s_P[node]), node)
        for node in range(len(max_blocks_P))
        if max_blocks_P[node] > 1
    ]
    heapq.heapify(queue)
    for _ in range(num_blocks - len(max_blocks_P)):
        _, node = heapq.heappop(queue)
        lengths_P[node] += 1
        if lengths_P[node] < max_blocks_P[node]:
            heapq.heappush(queue, (float((lengths_P[node] + 1) * block_s_P[node]), node))
    return lengths_P


def _check_fit(max_blocks_P: Ints, num_blocks: int) -> None:
    if not 0 < len(max_blocks_P) <= num_blocks <= int(max_blocks_P.sum()) or max_blocks_P.min() < 1:
        raise ValueError(
            f"{num_blocks} blocks do not fit nodes that hold at most {max_blocks_P.tolist()}"
        )


MAX_CANDIDATES = 192
MAX_EXACT_CANDIDATES = 9

CutRule = Callable[[Ints, Floats, int], Ints]


def find_pipeline(
    instance: PlacementProblem, allowed: Ints, nearest_s_N: Floats | None = None
) -> Chain | None:
    """A low-latency chain through nodes of `allowed` (indices), each at most once, or None.

    It is optimal for at most `MAX_EXACT_CANDIDATES` nodes. `nearest_s_N`: result of
    `nearest_transfer_s`, if known.
    """
    allowed = allowed[instance.max_blocks_N[allowed] > 0]
    if int(instance.max_blocks_N[allowed].sum()) < instance.problem.num_blocks:
        return None
    if len(allowed) <= MAX_EXACT_CANDIDATES:
        nodes = _search_subsets(instance, allowed)
    else:
        nodes = _search_states(instance, rank_nodes(instance, allowed, nearest_s_N))
    return None if nodes is None else cut_pipeline(instance, nodes, quickest_cuts)


def heuristic_pipeline(
    instance: PlacementProblem, allowed: Ints, nearest_s_N: Floats | None = None
) -> Chain | None:
    """A heuristic chain: the best-ranked nodes that hold the model, each next one the nearest."""
    best_first = rank_nodes(instance, allowed, nearest_s_N)
    held = np.cumsum(instance.max_blocks_N[best_first])
    if not len(held) or held[-1] < instance.problem.num_blocks:
        return None
    count = int(np.searchsorted(held, instance.problem.num_blocks)) + 1
    left = best_first[: min(count, instance.problem.num_blocks)].tolist()
    nodes = [min(left, key=lambda node: float(instance.problem.entry_s_N[node]))]
    left.remove(nodes[0])
    while left:
        away_s_N = instance.problem.transfer_s_NN[nodes[-1]]
        nodes.append(min(left, key=lambda node: float(away_s_N[node])))
        left.remove(nodes[-1])
    return cut_pipeline(instance, nodes, quickest_cuts)


def cut_pipeline(instance: PlacementProblem, nodes: Sequence[int], cut: CutRule) -> Chain:
    """The chain through `nodes` in that order, with blocks divided by `cut`."""
    chosen = np.array(nodes)
    lengths = cut(
        instance.max_blocks_N[chosen],
        instance.problem.busy_block_s_N[chosen],
        instance.problem.num_blocks,
    )
    ends = np.cumsum(lengths)
    return tuple(
        Visit(node, int(end - length), int(end))
        for node, length, end in zip(nodes, lengths, ends, strict=True)
    )


def rank_nodes(
    instance: PlacementProblem, allowed: Ints, nearest_s_N: Floats | None = None
) -> Ints:
    """The nodes of `allowed` ranked by the latency of a chain of nodes like each, best first.

    As many as hold the model twice, but at least `MAX_CANDIDATES`, if there are as many.
    """
    problem = instance.problem
    allowed = allowed[instance.max_blocks_N[allowed] > 0]
    if nearest_s_N is None:
        nearest_s_N = nearest_transfer_s(problem.transfer_s_NN)
    blocks, most_N = problem.num_blocks, instance.max_blocks_N[allowed]
    per_visit_s = problem.visit_s_N[allowed] + nearest_s_N[allowed]
    score_s = (
        blocks * (problem.busy_block_s_N[allowed] + per_visit_s / most_N)
        + problem.entry_s_N[allowed]
        + problem.exit_s_N[allowed]
    )
    best_first = allowed[np.argsort(score_s, kind="stable")]
    needed = int(np.searchsorted(np.cumsum(instance.max_blocks_N[best_first]), blocks)) + 1
    return best_first[: max(MAX_CANDIDATES, 2 * needed)]


def _search_states(instance: PlacementProblem, candidates: Ints) -> list[int] | None:
    problem = instance.problem
    blocks, size = problem.num_blocks, len(candidates)
    most_K = instance.max_blocks_N[candidates]
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


def _search_subsets(instance: PlacementProblem, candidates: Ints) -> list[int] | None:
    """Held-Karp dynamic program over subsets; the compute time of a subset is order-independent."""
    problem = instance.problem
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
        if not len(inside) <= problem.num_blocks <= int(instance.max_blocks_N[chosen].sum()):
            continue
        block_s = problem.busy_block_s_N[chosen]
        lengths = quickest_cuts(instance.max_blocks_N[chosen], block_s, problem.num_blocks)
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
