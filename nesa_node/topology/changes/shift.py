"""How far the network's connections have moved from the reference, against how far jitter moves them.

Two figures. The *shift* of the merge trees is homology's: at which scales nodes connect. A detour
that lengthens links no spanning tree uses leaves it as it was, hence the second one, the plain
*round trips*. `benchmarks changes` says what each finds.

Legend: N nodes, S sampled nodes, C nodes in all snapshots compared, K snapshots of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nesa_node.topology.changes.jitter import Jitter, judge_jitter
from nesa_node.topology.changes.triggers import Sensitivity, Trigger
from nesa_node.topology.homology.cophenetic import mean_difference
from nesa_node.topology.homology.filtration import Filtration
from nesa_node.topology.homology.merge_tree import MergeTree, merge_tree

# Of these nodes all round trips are remembered: 160 kB a snapshot, however large the swarm is.
_SAMPLED = 200
_COMPARED = 500


@dataclass(frozen=True, slots=True, eq=False)
class Connections:
    """A snapshot's round trips and their merge tree.

    peers : the names of the filtration's nodes, in its order.
    """

    peers: tuple[str, ...]
    filtration: Filtration
    tree: MergeTree


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """What is kept of a snapshot that later ones are compared with.

    place : each peer's index in the tree.
    unit : its median round trip, at least the smallest positive number.
    sampled : the sampled peers' indices in weight_SS, [S, S] float32.
    """

    place: dict[str, int]
    tree: MergeTree
    unit: float
    sampled: dict[str, int]
    weight_SS: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ShiftState:
    """`reference` holds the last calm snapshots, the newest last; at least one."""

    reference: tuple[Remembered, ...]
    shift: Jitter = field(default_factory=Jitter)
    round_trips: Jitter = field(default_factory=Jitter)


def connections_of(peers: tuple[str, ...], filtration: Filtration) -> Connections:
    """Raises `ValueError` where there are not as many peers as nodes, or one twice."""
    if len(peers) != len(filtration) or len(set(peers)) != len(peers):
        raise ValueError(f"{len(filtration)} nodes need as many different peers")
    return Connections(peers, filtration, merge_tree(filtration))


def judge_shift(
    state: ShiftState | None, now: Connections, sensitivity: Sensitivity
) -> tuple[ShiftState, tuple[Trigger, ...]]:
    """Compare `now` with the reference; the state to pass in next time, and two triggers.

    Both figures are mean absolute differences over pairs of nodes that are in all snapshots of the
    reference and in `now`, relative to the median round trip: of the cophenetic matrices, and of the
    round trips. The reference's value of a pair is the median of its snapshots': one of them alone
    would bring as much jitter as `now` does. Diagrams would forget which node is which. Nodes that
    left are not seen here.

    When one fires, `now` is the reference. A calm snapshot joins it; others may not, or an event
    would be what all else is compared with.
    """
    remembered = _remember(now)
    reference = state.reference if state else (remembered,)
    old = state or ShiftState(reference)
    cap = sensitivity.unreachable * reference[-1].unit
    shift, shifted = judge_jitter(
        old.shift,
        "shift",
        _shift(reference, remembered, cap) / reference[-1].unit,
        sensitivity,
        "nodes connect at scales that differ by {} of the median round trip",
    )
    trips, moved = judge_jitter(
        old.round_trips,
        "round trips",
        _moved(reference, now, remembered.place) / reference[-1].unit,
        sensitivity,
        "round trips differ by {} of their median",
    )
    if state is None:  # which compared a snapshot with itself
        return old, (shifted, moved)
    if shifted.fired or moved.fired:
        return ShiftState((remembered,), Jitter(shift.past), Jitter(trips.past)), (shifted, moved)
    if not shift.pending and not trips.pending:
        reference = (*reference, remembered)[-sensitivity.reference :]
    return ShiftState(reference, shift, trips), (shifted, moved)


def _remember(now: Connections) -> Remembered:
    count = len(now.peers)
    sample = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(np.int64))
    return Remembered(
        {peer: index for index, peer in enumerate(now.peers)},
        now.tree,
        now.filtration.median_weight() or float(np.finfo(np.float64).tiny),
        {now.peers[node]: index for index, node in enumerate(sample.tolist())},
        now.filtration.weight_NN[np.ix_(sample, sample)].astype(np.float32),
    )


def _shift(reference: tuple[Remembered, ...], now: Remembered, cap: float) -> float:
    """Of at most 500 of the nodes they share, which are pairs enough."""
    common = sorted(set(now.place).intersection(*(old.place for old in reference)))
    peers = common[:: -(-len(common) // _COMPARED) or 1]
    nodes_KC = np.array([[old.place[peer] for peer in peers] for old in reference], dtype=np.int64)
    now_C = np.array([now.place[peer] for peer in peers], dtype=np.int64)
    return mean_difference([old.tree for old in reference], nodes_KC, now.tree, now_C, cap=cap)


def _moved(reference: tuple[Remembered, ...], now: Connections, place: dict[str, int]) -> float:
    """A pair counts with at most the median round trip, so that few spikes are no change."""
    common = set(place).intersection(*(old.sampled for old in reference))
    if len(common) < 2:
        return 0.0
    peers = sorted(common)
    before = []
    for old in reference:
        nodes = np.array([old.sampled[peer] for peer in peers])
        before.append(old.weight_SS[np.ix_(nodes, nodes)].astype(np.float64))
    nodes = np.array([place[peer] for peer in peers])
    after_CC = now.filtration.weight_NN[np.ix_(nodes, nodes)]
    median_CC = np.median(before, axis=0)
    both = np.isinf(after_CC) & np.isinf(median_CC)
    away_CC = np.abs(np.where(both, 0.0, after_CC) - np.where(both, 0.0, median_CC))
    np.fill_diagonal(away_CC, 0.0)
    moved = np.minimum(away_CC, reference[-1].unit).sum()
    return float(moved) / (len(peers) * (len(peers) - 1))
