"""Local search by single moves, to missing replicas or to the bottleneck."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.span import Span
from nesa_node.routing.placement.flow import measure_flow
from nesa_node.routing.placement.room import Layout, Room
from nesa_node.routing.problem import Ints

_GAIN = 1.0 + 1e-6


def mend(room: Room, layout: Layout, *, keep: frozenset[int] = frozenset()) -> Layout:
    """Move spans to blocks without a holder or with missing replicas, until no move helps.

    Nodes in `keep` do not move.
    """
    movable = [
        node for node in np.argsort(-room.most_N, kind="stable").tolist() if node not in keep
    ]
    for _ in range(room.problem.num_nodes):
        before = layout.lacks(room)
        if before.replicas == 0:
            break
        best, best_lacks = layout, before
        for node in movable:
            moved = most_wanted(room, layout, node)
            lacks = moved.lacks(room)
            if lacks < best_lacks:
                best, best_lacks = moved, lacks
        if best is layout:
            break
        layout = best
    return layout


def most_wanted(room: Room, layout: Layout, node: int) -> Layout:
    """`layout` with `node` moved to the span that covers most of the deficit without it."""
    most = int(room.most_N[node])
    if most == 0:
        return layout
    holders_B = layout.holders_B(room.problem.num_blocks)
    holders_B[layout.starts_N[node] : layout.ends_N[node]] -= 1
    # A block without a holder outweighs all replicas that could be missing elsewhere.
    wanted_B = (holders_B < room.replicas) + len(holders_B) * (holders_B == 0)
    start = int(_windows(wanted_B, most).argmax())
    return layout.moved(node, Span(start, start + most))


def widen(room: Room, layout: Layout, *, tries: int = 200, max_moves: int | None = None) -> Layout:
    """Move nodes that hold no bottleneck block to the bottleneck, until no move helps.

    At most `tries` moves are tried and `max_moves` made.
    """
    rate_N = room.blocks_per_s_N
    blocks = room.problem.num_blocks
    lacks = layout.lacks(room)
    flow = measure_flow(layout, rate_N, blocks)
    moves = 0
    while tries > 0 and moves != max_moves:
        improved = False
        for node in _idle(room, layout, flow.narrow_B):
            for start in _touching(flow.narrow_B, int(room.most_N[node])):
                tries -= 1
                moved = layout.moved(node, Span(start, start + int(room.most_N[node])))
                if lacks < moved.lacks(room):
                    continue
                wider = measure_flow(moved, rate_N, blocks)
                if wider.steps_per_s > flow.steps_per_s * _GAIN:
                    layout, flow, lacks = moved, wider, moved.lacks(room)
                    improved = True
                    moves += 1
                    break
            if improved or tries <= 0:
                break
        if not improved:
            break
    return layout


def _idle(room: Room, layout: Layout, narrow_B: NDArray[np.bool_]) -> list[int]:
    """Nodes that hold no block of the bottleneck, the fastest first."""
    before_B = np.concatenate(([0], np.cumsum(narrow_B)))
    touches_N = before_B[layout.ends_N] > before_B[layout.starts_N]
    idle = np.flatnonzero(~touches_N & (room.most_N > 0))
    fastest_first: list[int] = idle[np.argsort(-room.blocks_per_s_N[idle], kind="stable")].tolist()
    return fastest_first


def _touching(narrow_B: NDArray[np.bool_], most: int) -> list[int]:
    """Starts of spans that cover most of the bottleneck, or reach its first or last block."""
    inside = np.flatnonzero(narrow_B)
    last = len(narrow_B) - most
    best = int(_windows(narrow_B.astype(np.int64), most).argmax())
    lowest, highest = max(0, int(inside[0]) - most + 1), min(last, int(inside[-1]))
    return list(dict.fromkeys((best, lowest, highest)))


def _windows(values_B: Ints, width: int) -> Ints:
    sums = np.concatenate(([0], np.cumsum(values_B)))
    windows: Ints = sums[width:] - sums[:-width]
    return windows
