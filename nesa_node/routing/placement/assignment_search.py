"""Search for assignments: local by single moves, and exhaustive for a few nodes.

M assignments, N nodes, B blocks, U sets of blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.ids import Span
from nesa_node.routing.placement.placement_problem import Assignment, PlacementProblem, window_sums
from nesa_node.routing.placement.score import Goal, score_assignment, solve_max_flow

_MIN_GAIN_RATIO = 1.0 + 1e-6


def repair_coverage(
    instance: PlacementProblem,
    assignment: Assignment,
    *,
    pinned_nodes: frozenset[int] = frozenset(),
) -> Assignment:
    """Move spans to blocks without a holder or with missing replicas, until no move helps.

    Nodes in `pinned_nodes` do not move.
    """
    movable = [
        node
        for node in np.argsort(-instance.max_blocks_N, kind="stable").tolist()
        if node not in pinned_nodes
    ]
    for _ in range(instance.problem.num_nodes):
        before = assignment.deficit(instance)
        if before.replicas == 0:
            break
        best, best_deficit = assignment, before
        for node in movable:
            moved = move_to_deficit(instance, assignment, node)
            deficit = moved.deficit(instance)
            if deficit < best_deficit:
                best, best_deficit = moved, deficit
        if best is assignment:
            break
        assignment = best
    return assignment


def move_to_deficit(instance: PlacementProblem, assignment: Assignment, node: int) -> Assignment:
    """`assignment` with `node` moved to the span that covers most of the deficit without it."""
    most = int(instance.max_blocks_N[node])
    if most == 0:
        return assignment
    holders_B = assignment.count_holders_B(instance.problem.num_blocks) + instance.others.holders_B
    holders_B[assignment.starts_N[node] : assignment.ends_N[node]] -= 1
    # A block without a holder outweighs all replicas that could be missing elsewhere.
    wanted_B = (holders_B < instance.replicas) + len(holders_B) * (holders_B == 0)
    start = int(window_sums(wanted_B.astype(np.float64), most).argmax())
    return assignment.with_span(node, Span(start, start + most))


def balance_throughput(
    instance: PlacementProblem,
    assignment: Assignment,
    *,
    tries: int = 200,
    max_moves: int | None = None,
) -> Assignment:
    """Move nodes that hold no bottleneck block to the bottleneck, until no move helps.

    At most `tries` moves are tried and `max_moves` made.
    """
    rate_N = instance.blocks_per_s_N
    blocks = instance.problem.num_blocks
    deficit = assignment.deficit(instance)
    flow = solve_max_flow(assignment, rate_N, blocks, instance.others.speed_SE)
    moves = 0
    while tries > 0 and moves != max_moves:
        improved = False
        for node in _nodes_off_bottleneck(instance, assignment, flow.bottleneck_B):
            for start in _starts_at_bottleneck(flow.bottleneck_B, int(instance.max_blocks_N[node])):
                tries -= 1
                moved = assignment.with_span(
                    node, Span(start, start + int(instance.max_blocks_N[node]))
                )
                if deficit < moved.deficit(instance):
                    continue
                wider = solve_max_flow(moved, rate_N, blocks, instance.others.speed_SE)
                if wider.steps_per_s > flow.steps_per_s * _MIN_GAIN_RATIO:
                    assignment, flow, deficit = moved, wider, moved.deficit(instance)
                    improved = True
                    moves += 1
                    break
            if improved or tries <= 0:
                break
        if not improved:
            break
    return assignment


def _nodes_off_bottleneck(
    instance: PlacementProblem, assignment: Assignment, narrow_B: NDArray[np.bool_]
) -> list[int]:
    """Nodes that hold no block of the bottleneck, the fastest first."""
    before_B = np.concatenate(([0], np.cumsum(narrow_B)))
    touches_N = before_B[assignment.ends_N] > before_B[assignment.starts_N]
    idle = np.flatnonzero(~touches_N & (instance.max_blocks_N > 0))
    fastest_first: list[int] = idle[
        np.argsort(-instance.blocks_per_s_N[idle], kind="stable")
    ].tolist()
    return fastest_first


def _starts_at_bottleneck(narrow_B: NDArray[np.bool_], max_blocks: int) -> list[int]:
    """Starts of spans that cover most of the bottleneck, or reach its first or last block."""
    inside = np.flatnonzero(narrow_B)
    last = len(narrow_B) - max_blocks
    best = int(window_sums(narrow_B.astype(np.float64), max_blocks).argmax())
    lowest, highest = max(0, int(inside[0]) - max_blocks + 1), min(last, int(inside[-1]))
    return list(dict.fromkeys((best, lowest, highest)))


MAX_ASSIGNMENTS = 20_000
MAX_BLOCKS = 10
_BATCH_SIZE = 4096


def count_assignments(instance: PlacementProblem) -> int:
    """The number of assignments, an exact int of any size."""
    count = 1
    for most in instance.max_blocks_N.tolist():
        count *= instance.problem.num_blocks - most + 1 if most else 1
    return count


def find_best_assignment(instance: PlacementProblem, goal: Goal) -> Assignment:
    """The best assignment: fewest holes, then fewest missing replicas, then the best by `goal`.

    Every node holds as many blocks as fit (more never hurts), so that M assignments of N nodes are
    one start per node.

    Raises `ValueError` for more than `MAX_ASSIGNMENTS` assignments or `MAX_BLOCKS` blocks.
    """
    if count_assignments(instance) > MAX_ASSIGNMENTS or instance.problem.num_blocks > MAX_BLOCKS:
        raise ValueError(
            f"{count_assignments(instance)} layouts are too many for exhaustive search"
        )
    if instance.problem.num_nodes == 0:
        return instance.current_assignment()
    starts_MN = _all_starts(instance)
    holders_MB = _count_holders(instance, starts_MN)
    holes_M = (holders_MB == 0).sum(axis=1)
    lacks_M = np.maximum(instance.replicas - holders_MB, 0).sum(axis=1)
    starts_MN = starts_MN[holes_M == holes_M.min()]
    lacks_M = lacks_M[holes_M == holes_M.min()]
    starts_MN = starts_MN[lacks_M == lacks_M.min()]
    if goal == "throughput":
        return instance.assign_full_spans(starts_MN[np.argmax(_steps_per_s(instance, starts_MN))])
    return _lowest_latency(instance, starts_MN)


def _lowest_latency(instance: PlacementProblem, starts_MN: Ints) -> Assignment:
    """The assignment of least latency, with exact chains only where the relaxed cost is lower."""
    relaxed_s_M = np.concatenate(
        [
            _relaxed_latency_s(instance, starts_MN[at : at + _BATCH_SIZE])
            for at in range(0, len(starts_MN), _BATCH_SIZE)
        ]
    )
    best, best_s = instance.assign_full_spans(starts_MN[0]), np.inf
    for row in np.argsort(relaxed_s_M, kind="stable"):
        if relaxed_s_M[row] >= best_s:
            break
        assignment = instance.assign_full_spans(starts_MN[row])
        cost_s = score_assignment(instance, assignment).latency_s
        if cost_s < best_s:
            best, best_s = assignment, cost_s
    return best


def _all_starts(instance: PlacementProblem) -> Ints:
    choices = [
        np.arange(instance.problem.num_blocks - most + 1 if most else 1)
        for most in instance.max_blocks_N.tolist()
    ]
    grid = np.meshgrid(*choices, indexing="ij")
    return np.stack([axis.ravel() for axis in grid], axis=1).astype(np.int64)


def _holds_block(instance: PlacementProblem, starts_MN: Ints, block: int) -> np.ndarray:
    return (starts_MN <= block) & (block < starts_MN + instance.max_blocks_N)


def _count_holders(instance: PlacementProblem, starts_MN: Ints) -> Ints:
    counts = [
        _holds_block(instance, starts_MN, block).sum(axis=1)
        for block in range(instance.problem.num_blocks)
    ]
    return np.stack(counts, axis=1)


def _relaxed_latency_s(instance: PlacementProblem, starts_MN: Ints) -> Floats:
    """The latency [M] of each assignment with revisits allowed: a lower bound."""
    problem = instance.problem
    away_s_NN = problem.transfer_s_NN.copy()
    np.fill_diagonal(away_s_NN, np.inf)
    done_s_MN = np.zeros(starts_MN.shape)
    for block in range(problem.num_blocks):
        if block == 0:
            entered_s_MN = np.broadcast_to(problem.entry_s_N + problem.visit_s_N, starts_MN.shape)
            done_s_MN = entered_s_MN
        else:
            entered_s_MN = (done_s_MN[:, :, None] + away_s_NN).min(axis=1) + problem.visit_s_N
            done_s_MN = np.minimum(done_s_MN, entered_s_MN)
        done_s_MN = np.where(
            _holds_block(instance, starts_MN, block), done_s_MN + problem.busy_block_s_N, np.inf
        )
    return np.asarray((done_s_MN + problem.exit_s_N).min(axis=1))


def _steps_per_s(instance: PlacementProblem, starts_MN: Ints) -> Floats:
    """Throughput [M]: least ratio, over sets of blocks, of their holders' speed to their size."""
    blocks, rate_N = instance.problem.num_blocks, instance.blocks_per_s_N
    sets_UB = (np.arange(1, 1 << blocks)[:, None] >> np.arange(blocks)) & 1
    before_UB = np.concatenate([np.zeros((len(sets_UB), 1), dtype=np.int64), sets_UB], axis=1)
    before_UB = np.cumsum(before_UB, axis=1)
    least_M = np.full(len(starts_MN), np.inf)
    for at in range(0, len(sets_UB), 64):
        inside_U = before_UB[at : at + 64]
        touched = inside_U[:, starts_MN + instance.max_blocks_N] > inside_U[:, starts_MN]
        ratios_UM = (touched * rate_N).sum(axis=2) / inside_U[:, -1:]
        np.minimum(least_M, ratios_UM.min(axis=0), out=least_M)
    return least_M
