"""The chain selection problem: the nodes of a snapshot as arrays, times in seconds.

N nodes, B blocks of the session's span, numbered from 0. All times are for one *step* of the
session: one token of each row when decoding, a chunk of the prompt when prefilling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.ids import PeerId


@dataclass(frozen=True, slots=True, order=True)
class Visit:
    """A run of blocks `start <= b < end` of the problem on node number `node`."""

    node: int
    start: int
    end: int


Chain = tuple[Visit, ...]


_TIME_FIELDS = ("block_s_N", "visit_s_N", "entry_s_N", "exit_s_N", "transfer_s_NN")
_NODE_FIELDS = (
    *("starts_N", "ends_N", "load_N", "spare_N", "reliability_N", "stability_N"),
    *("block_s_N", "visit_s_N", "entry_s_N", "exit_s_N"),
)


@dataclass(frozen=True, slots=True, eq=False)
class ChainProblem:
    """N nodes from which a chain is chosen.

    The time of a step through a chain is the sum of: `entry_s_N` of the first node (from the
    client), for every visit `visit_s_N` plus its blocks times `block_s_N` times (1 + `load_N`),
    `transfer_s_NN[i, j]` where i sends to j, and `exit_s_N` of the last node (to the client).

    `starts_N`, `ends_N`: the blocks that a node holds, clipped to the problem's. `visit_s_N`: fixed
    cost of a visit, failure penalties included. `load_N`: share of its time that a node is busy
    with other sessions, 0 idle, 1 saturated. `spare_N`: G of eq. 18, free share of its memory, 0 to
    1. `reliability_N`: R of eq. 18, probability that the node is available when needed;
    `stability_N`: topological stability (homology), 1 if unknown.

    Raises `ValueError` for other shapes, NaN, times and loads below 0, and spans outside the
    problem's. Times may be infinite: such nodes and links are not used.
    """

    peers: tuple[PeerId, ...]
    num_blocks: int
    starts_N: Ints
    ends_N: Ints
    block_s_N: Floats
    visit_s_N: Floats
    load_N: Floats
    spare_N: Floats
    reliability_N: Floats
    stability_N: Floats
    entry_s_N: Floats
    exit_s_N: Floats
    transfer_s_NN: Floats

    def __post_init__(self) -> None:
        size = self.num_nodes
        for name in _NODE_FIELDS:
            if getattr(self, name).shape != (size,):
                raise ValueError(f"{name} must have shape {(size,)}")
        if self.transfer_s_NN.shape != (size, size):
            raise ValueError(f"transfer_s_NN must have shape {(size, size)}")
        spans = (self.starts_N >= 0) & (self.starts_N <= self.ends_N)
        if not (spans & (self.ends_N <= self.num_blocks)).all():
            raise ValueError(f"spans must lie within 0:{self.num_blocks}")
        for name in (*_TIME_FIELDS, "load_N"):
            # `not >=` instead of `<` also rejects NaN.
            if not getattr(self, name).min(initial=0.0) >= 0.0:
                raise ValueError(f"{name} must not be negative or NaN")
        for name in ("spare_N", "reliability_N", "stability_N"):
            shares_N = getattr(self, name)
            if not ((shares_N >= 0.0) & (shares_N <= 1.0)).all():
                raise ValueError(f"{name} must lie within 0 and 1")
        if not np.isfinite(self.load_N).all():
            raise ValueError("load_N must be finite")

    @property
    def num_nodes(self) -> int:
        return len(self.peers)

    @property
    def busy_block_s_N(self) -> Floats:
        """Seconds per block, queueing behind other sessions included."""
        return self.block_s_N * (1.0 + self.load_N)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step through a chain, by cause."""

    entry_s: float
    visits_s: float
    compute_s: float
    transfer_s: float
    exit_s: float

    @property
    def total_s(self) -> float:
        return self.entry_s + self.visits_s + self.compute_s + self.transfer_s + self.exit_s


def step_time(problem: ChainProblem, chain: Sequence[Visit]) -> StepTime:
    """The time of a step through `chain`. Raises `ValueError` if it does not fit the problem."""
    check_chain(problem, chain)
    if not chain:
        return StepTime(0.0, 0.0, 0.0, 0.0, 0.0)
    nodes = [visit.node for visit in chain]
    lengths = np.array([visit.end - visit.start for visit in chain])
    return StepTime(
        entry_s=float(problem.entry_s_N[nodes[0]]),
        visits_s=float(problem.visit_s_N[nodes].sum()),
        compute_s=float((problem.busy_block_s_N[nodes] * lengths).sum()),
        transfer_s=float(problem.transfer_s_NN[nodes[:-1], nodes[1:]].sum()),
        exit_s=float(problem.exit_s_N[nodes[-1]]),
    )


def check_chain(problem: ChainProblem, chain: Sequence[Visit]) -> None:
    """Raise `ValueError` unless `chain` runs every block once, in order, where it is held."""
    at = 0
    for visit in chain:
        if visit.start != at or visit.end <= visit.start:
            raise ValueError(f"blocks are not in order at {visit}, expected to go on from {at}")
        held = range(int(problem.starts_N[visit.node]), int(problem.ends_N[visit.node]))
        if visit.start not in held or visit.end - 1 not in held:
            raise ValueError(f"{visit} runs blocks that node {visit.node} does not hold")
        at = visit.end
    if at != problem.num_blocks:
        raise ValueError(f"the chain ends at block {at} of {problem.num_blocks}")


TOKENS_PER_SESSION = 200
"""Assumed tokens of a session, over which a recovery is spread."""
RECOVERY_S = 10.0
"""Seconds to recover from a lost node: detect it, find a replacement, replay the cache
(`python -m benchmarks churn`)."""


def expected_loss_s(problem: ChainProblem) -> Floats:
    """Expected seconds lost per token by a visit to each node, float64 [N].

    A node that fails interrupts the session once, until a replacement has taken over: the loss is
    the probability of failure times the recovery time, divided by the tokens of the session.
    `benchmarks routing` measures the effect on latency.
    """
    seconds_N: Floats = (1.0 - problem.reliability_N) * (RECOVERY_S / TOKENS_PER_SESSION)
    return seconds_N


def add_failure_costs(problem: ChainProblem) -> ChainProblem:
    """`problem` with the expected loss added to the cost of each visit."""
    return replace(problem, visit_s_N=problem.visit_s_N + expected_loss_s(problem))


def chain_expected_loss_s(problem: ChainProblem, chain: Chain) -> float:
    """Expected seconds lost per token by a session through `chain`."""
    return float(expected_loss_s(problem)[[visit.node for visit in chain]].sum()) if chain else 0.0
