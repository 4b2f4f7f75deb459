"""Exhaustive search for the best assignment of spans to a few nodes.

M assignments, N nodes, B blocks, U sets of blocks. Every node holds as many blocks as fit (more
never hurts), so that an assignment is one start per node.
"""

from __future__ import annotations

import numpy as np

from nesa_node.routing.placement.room import Layout, Room
from nesa_node.routing.placement.score import Goal, measure
from nesa_node.routing.problem import Floats, Ints

MAX_LAYOUTS = 20_000
MAX_BLOCKS = 10
_AT_ONCE = 4096


def count_layouts(room: Room) -> int:
    """The number of assignments, an exact int of any size."""
    count = 1
    for most in room.most_N.tolist():
        count *= room.problem.num_blocks - most + 1 if most else 1
    return count


def best_of_all(room: Room, goal: Goal) -> Layout:
    """The best assignment: fewest holes, then fewest missing replicas, then the best by `goal`.

    Every node holds as many blocks as fit (more never hurts), so that M assignments of N nodes are
    one start per node.

    Raises `ValueError` for more than `MAX_LAYOUTS` assignments or `MAX_BLOCKS` blocks.
    """
    if count_layouts(room) > MAX_LAYOUTS or room.problem.num_blocks > MAX_BLOCKS:
        raise ValueError(f"{count_layouts(room)} layouts are too many for exhaustive search")
    if room.problem.num_nodes == 0:
        return room.now()
    starts_MN = _all_starts(room)
    holders_MB = _holders(room, starts_MN)
    holes_M = (holders_MB == 0).sum(axis=1)
    lacks_M = np.maximum(room.replicas - holders_MB, 0).sum(axis=1)
    starts_MN = starts_MN[holes_M == holes_M.min()]
    lacks_M = lacks_M[holes_M == holes_M.min()]
    starts_MN = starts_MN[lacks_M == lacks_M.min()]
    if goal == "throughput":
        return room.widest(starts_MN[np.argmax(_steps_per_s(room, starts_MN))])
    return _quickest(room, starts_MN)


def _quickest(room: Room, starts_MN: Ints) -> Layout:
    """The assignment of least latency, with exact chains only where the relaxed cost is lower."""
    relaxed_s_M = np.concatenate(
        [
            _relaxed_latency_s(room, starts_MN[at : at + _AT_ONCE])
            for at in range(0, len(starts_MN), _AT_ONCE)
        ]
    )
    best, best_s = room.widest(starts_MN[0]), np.inf
    for row in np.argsort(relaxed_s_M, kind="stable"):
        if relaxed_s_M[row] >= best_s:
            break
        layout = room.widest(starts_MN[row])
        cost_s = measure(room, layout).latency_s
        if cost_s < best_s:
            best, best_s = layout, cost_s
    return best


def _all_starts(room: Room) -> Ints:
    choices = [
        np.arange(room.problem.num_blocks - most + 1 if most else 1)
        for most in room.most_N.tolist()
    ]
    grid = np.meshgrid(*choices, indexing="ij")
    return np.stack([axis.ravel() for axis in grid], axis=1).astype(np.int64)


def _holds(room: Room, starts_MN: Ints, block: int) -> np.ndarray:
    return (starts_MN <= block) & (block < starts_MN + room.most_N)


def _holders(room: Room, starts_MN: Ints) -> Ints:
    counts = [
        _holds(room, starts_MN, block).sum(axis=1) for block in range(room.problem.num_blocks)
    ]
    return np.stack(counts, axis=1)


def _relaxed_latency_s(room: Room, starts_MN: Ints) -> Floats:
    """The latency [M] of each assignment with revisits allowed: a lower bound."""
    problem = room.problem
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
            _holds(room, starts_MN, block), done_s_MN + problem.busy_block_s_N, np.inf
        )
    return np.asarray((done_s_MN + problem.exit_s_N).min(axis=1))


def _steps_per_s(room: Room, starts_MN: Ints) -> Floats:
    """Throughput [M]: least ratio, over sets of blocks, of their holders' speed to their size."""
    blocks, rate_N = room.problem.num_blocks, room.blocks_per_s_N
    sets_UB = (np.arange(1, 1 << blocks)[:, None] >> np.arange(blocks)) & 1
    before_UB = np.concatenate([np.zeros((len(sets_UB), 1), dtype=np.int64), sets_UB], axis=1)
    before_UB = np.cumsum(before_UB, axis=1)
    least_M = np.full(len(starts_MN), np.inf)
    for at in range(0, len(sets_UB), 64):
        inside_U = before_UB[at : at + 64]
        touched = inside_U[:, starts_MN + room.most_N] > inside_U[:, starts_MN]
        ratios_UM = (touched * rate_N).sum(axis=2) / inside_U[:, -1:]
        np.minimum(least_M, ratios_UM.min(axis=0), out=least_M)
    return least_M
