"""Shortest paths over (block, node) by min-plus products.

N nodes, B blocks, S nodes that may send at a boundary, R nodes that may receive there.

State (b, i) is "blocks before b are done, the last of them by node i". A node is entered only at
the boundary between two blocks, where every receiver takes the minimum over all senders: S x R
numbers per boundary. A path may revisit a node; `exact.py` excludes that.

Two bounds prune the states. A backward pass, with every transfer replaced by its sender's shortest
one, gives a lower bound on the remaining cost of each state. A forward pass from a beam of senders
gives a chain, hence an upper bound. A state whose lower bound exceeds it is on no shortest path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import Chain, ChainProblem, Visit
from nesa_node.topology.snapshot import zero_runs

Mask = NDArray[np.bool_]

_BEAM_SENDERS = 16
"""Senders per boundary in the forward pass that finds an upper bound."""
ROUNDING_SLACK = 1.0 + 1e-9
"""Relative tolerance for sums that were added in different orders."""


@dataclass(frozen=True, slots=True)
class CostedChain:
    """A chain that may visit a node twice, and its cost."""

    cost_s: float
    chain: Chain


def holder_mask(problem: ChainProblem) -> Mask:
    """Whether node N holds block B, bool [B, N].

    Raises `MissingBlocksError` if some block has no holder.
    """
    blocks_B1 = np.arange(problem.num_blocks)[:, None]
    holds_BN = (problem.starts_N <= blocks_B1) & (blocks_B1 < problem.ends_N)
    missing = zero_runs(holds_BN.sum(axis=1).tolist())
    if missing:
        raise missing_blocks_error(missing)
    return holds_BN


def missing_blocks_error(missing: tuple[Span, ...]) -> MissingBlocksError:
    ranges = ", ".join(str(run) for run in missing)
    return MissingBlocksError(
        [(run.start, run.end) for run in missing],
        f"no usable node holds blocks {ranges}; wait for one to join or start one with "
        f"`nesa-node run MODEL --block-indices {missing[0]}`",
    )


class MinPlus:
    """Shortest-path searches over one problem."""

    def __init__(self, problem: ChainProblem) -> None:
        self.problem = problem
        self.busy_block_s_N = problem.busy_block_s_N
        self.nearest_s_N = nearest_transfer_s(problem.transfer_s_NN)

    def shortest(
        self,
        holds_BN: Mask,
        *,
        at_ends: bool = False,
        below_s: float = np.inf,
    ) -> CostedChain | None:
        """The cheapest path that runs each block on one of its holders by `holds_BN`.

        None if there is no path of at most `below_s`. With `at_ends` a path leaves nodes only at
        the end of their spans. Ties: staying before moving, then the lower index.
        """
        program = _MinPlusPass(self, holds_BN, at_ends)
        found_s = program.forward(below_s, _BEAM_SENDERS)
        cost_s = program.forward(min(below_s, found_s) * ROUNDING_SLACK, None)
        if not cost_s <= below_s or cost_s == np.inf:
            return None
        return CostedChain(cost_s, program.trace_back())

    def nodes_within(self, holds_BN: Mask, limit_s: float) -> tuple[Ints, Floats]:
        """The nodes on some path of at most `limit_s`, and lower bounds of their remaining cost.

        Node indices [n]; float64 [B, n]: least cost from running block B on a node to the end.
        """
        program = _MinPlusPass(self, holds_BN)
        program.forward(limit_s * ROUNDING_SLACK, None)
        before_s_BN = np.minimum(program.done_s_BN[:-1], program.entered_s_BN[:-1])
        least_s_N = (before_s_BN + program.ahead_s_BN).min(axis=0)
        nodes = np.flatnonzero(least_s_N <= limit_s * ROUNDING_SLACK)
        return nodes, program.ahead_s_BN[:, nodes]

    def unreached_span(self, holds_BN: Mask) -> Span:
        """The blocks that no path reaches for lack of links; the last if only the exit is cut."""
        program = _MinPlusPass(self, holds_BN)
        program.forward(np.inf, None)
        done = np.isfinite(program.done_s_BN[1:]).any(axis=1)
        blocks = self.problem.num_blocks
        return Span(min(int(done.sum()), blocks - 1), blocks)


class _MinPlusPass:
    """State of one search; `since_BN[b, i]` is where the visit began in which i ran block b - 1."""

    def __init__(
        self,
        shared: MinPlus,
        holds_BN: Mask,
        at_ends: bool = False,
    ) -> None:
        problem = shared.problem
        self.problem = problem
        self.busy_block_s_N = shared.busy_block_s_N
        self.nearest_s_N = shared.nearest_s_N
        self.holders = [np.flatnonzero(holds_N) for holds_N in holds_BN]
        self.leavers = [
            holders[problem.ends_N[holders] == block + 1] if at_ends else holders
            for block, holders in enumerate(self.holders)
        ]
        self.ahead_s_BN, self.from_here_s_B = self._lower_bounds()
        shape = (problem.num_blocks + 1, problem.num_nodes)
        self.done_s_BN = np.full(shape, np.inf)
        self.entered_s_BN = np.full(shape, np.inf)
        self.since_BN = np.zeros(shape, dtype=np.int64)

    def _lower_bounds(self) -> tuple[Floats, list[float]]:
        """Least remaining cost from running block b on node i, and from entering any node at b."""
        problem = self.problem
        ahead_s_BN = np.full((problem.num_blocks, problem.num_nodes), np.inf)
        from_here_s_B = [np.inf] * problem.num_blocks
        for block in range(problem.num_blocks - 1, -1, -1):
            holders, leavers = self.holders[block], self.leavers[block]
            if block + 1 < problem.num_blocks:
                ahead_s_BN[block, holders] = ahead_s_BN[block + 1, holders]
                leaving_s = self.nearest_s_N[leavers] + from_here_s_B[block + 1]
            else:
                leaving_s = problem.exit_s_N[leavers]
            row_N = ahead_s_BN[block]
            row_N[leavers] = np.minimum(row_N[leavers], leaving_s)
            row_N[holders] += self.busy_block_s_N[holders]
            if len(holders):
                from_here_s_B[block] = float((problem.visit_s_N[holders] + row_N[holders]).min())
        return ahead_s_BN, from_here_s_B

    def forward(self, limit_s: float, beam: int | None) -> float:
        """The cost of the cheapest path of at most `limit_s`, with `beam` senders per boundary."""
        problem = self.problem
        for block, holders in enumerate(self.holders):
            entered_s_N = self.entered_s_BN[block]
            entered_s_N.fill(np.inf)
            if block == 0:
                entered_s_N[holders] = problem.entry_s_N[holders] + problem.visit_s_N[holders]
            else:
                self._enter(block, limit_s, beam)
            self.done_s_BN[block + 1].fill(np.inf)
            self._run_block(block, holders)
        last = self.leavers[-1]
        return float((self.done_s_BN[-1, last] + problem.exit_s_N[last]).min(initial=np.inf))

    def _enter(self, block: int, limit_s: float, beam: int | None) -> None:
        """Set the cost of entering `block` for the receivers that the bounds do not exclude."""
        problem = self.problem
        senders, done_s_S = self._senders(block)
        leaving_s_S = done_s_S + self.nearest_s_N[senders]
        keep = leaving_s_S + self.from_here_s_B[block] <= limit_s
        senders, done_s_S, leaving_s_S = senders[keep], done_s_S[keep], leaving_s_S[keep]
        if not len(senders):
            return
        receivers = self.holders[block]
        least_s_R = problem.visit_s_N[receivers] + leaving_s_S.min()
        receivers = receivers[least_s_R + self.ahead_s_BN[block, receivers] <= limit_s]
        if beam is not None and len(senders) > beam:
            few = np.argpartition(leaving_s_S, beam)[:beam]
            senders, done_s_S = senders[few], done_s_S[few]
        sums_s_SR = problem.transfer_s_NN[np.ix_(senders, receivers)]
        sums_s_SR += done_s_S[:, None]
        entered_s_R = sums_s_SR.min(axis=0) + problem.visit_s_N[receivers]
        self.entered_s_BN[block, receivers] = entered_s_R

    def _run_block(self, block: int, holders: Ints) -> None:
        """Run `block` on each holder, which continues its visit or begins one."""
        stayed_s = self.done_s_BN[block, holders]
        entered_s = self.entered_s_BN[block, holders]
        went_on = stayed_s <= entered_s
        cost_s = np.where(went_on, stayed_s, entered_s) + self.busy_block_s_N[holders]
        self.done_s_BN[block + 1, holders] = cost_s
        self.since_BN[block + 1, holders] = np.where(went_on, self.since_BN[block, holders], block)

    def _senders(self, block: int) -> tuple[Ints, Floats]:
        senders = self.leavers[block - 1]
        done_s_S = self.done_s_BN[block, senders]
        reached = done_s_S < np.inf
        return senders[reached], done_s_S[reached]

    def trace_back(self) -> Chain:
        """The path that the last `forward` found."""
        problem = self.problem
        last = self.leavers[-1]
        node = int(last[np.argmin(self.done_s_BN[-1, last] + problem.exit_s_N[last])])
        end = problem.num_blocks
        visits: list[Visit] = []
        while True:
            start = int(self.since_BN[end, node])
            visits.append(Visit(node, start, end))
            if start == 0:
                break
            senders, done_s_S = self._senders(start)
            node = int(senders[np.argmin(done_s_S + problem.transfer_s_NN[senders, node])])
            end = start
        return tuple(reversed(visits))


def nearest_transfer_s(array_NN: Floats, rows_at_once: int = 64) -> Floats:
    """The minimum of each row without the diagonal, by groups of rows that fit the CPU cache."""
    size = len(array_NN)
    minima_N = np.full(size, np.inf)
    for start in range(0, size, rows_at_once):
        rows = np.array(array_NN[start : start + rows_at_once])
        here = np.arange(len(rows))
        rows[here, start + here] = np.inf
        minima_N[start : start + len(rows)] = rows.min(axis=1, initial=np.inf)
    return minima_N
