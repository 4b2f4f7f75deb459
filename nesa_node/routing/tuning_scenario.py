"""Scenarios on which parameters of chains are measured: a choice, and what becomes of it.

Recorded snapshots show both: chains are chosen by one snapshot and its past, and the steps and
failures of the session are those of the snapshots after it.

K draws of failures, N nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nesa_node.core.arrays import Bools, Floats
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import (
    RECOVERY_S,
    TOKENS_PER_SESSION,
    Chain,
    ChainProblem,
    ChainRequest,
    build_problem,
    step_time,
)
from nesa_node.routing.reputation import SESSION_HORIZON_S
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import GreedyInputs
from nesa_node.topology.shape.stability import (
    MAX_HEIGHTS,
    ConnectionHeights,
    connection_heights,
    node_stability,
)
from nesa_node.topology.snapshot import Snapshot

FAILURE_DRAWS = 32
"""Sessions per scenario for which failures are drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningScenario:
    """A problem with the inputs shared by all candidates, and what becomes of chains.

    `outcome` has the times that the session's steps take. `optimum_s`: its shortest step.
    `failures_N`: share of the sessions that each node interrupts.
    """

    prepared: GreedyInputs
    outcome: ChainProblem
    optimum_s: float
    failures_N: Floats

    @classmethod
    def from_problem(
        cls,
        problem: ChainProblem,
        rng: np.random.Generator,
        *,
        draws: int = FAILURE_DRAWS,
    ) -> TuningScenario:
        """A scenario in which `problem` lasts, and K drawn sessions meet failures.

        A node's reliability is the chance that it stays for a session. Raises `MissingBlocksError`.
        """
        fails_KN = rng.random((draws, problem.num_nodes)) >= problem.reliability_N
        return cls.from_outcome(problem, problem, fails_KN.mean(axis=0))

    @classmethod
    def from_outcome(
        cls, problem: ChainProblem, outcome: ChainProblem, failures_N: Floats
    ) -> TuningScenario:
        """A scenario in which chains are chosen by `problem`, and their steps take `outcome`.

        Both have the same nodes. Raises `MissingBlocksError`.
        """
        optimum_s = step_time(outcome, exact_latency(outcome)).total_s
        return cls(GreedyInputs.from_problem(problem), outcome, optimum_s, failures_N)

    def time_ratio(self, chain: Chain) -> float:
        """Time through `chain`, recoveries included, over the optimum without failures."""
        nodes = [visit.node for visit in chain]
        lost_s = RECOVERY_S * float(self.failures_N[nodes].sum()) / TOKENS_PER_SESSION
        return (step_time(self.outcome, chain).total_s + lost_s) / self.optimum_s


MAX_NODE_PAIRS = 16_000_000
"""Pairs of nodes in all scenarios that are in memory at once, at 8 bytes each."""
CLIENTS_PER_SNAPSHOT = 3
"""Clients per snapshot: the result of a single one depends too much on its position."""
MAX_OUTCOME_SNAPSHOTS = 4
"""Most later snapshots from which the steps of a session are taken."""
_MIN_CLIENT_RTT_MS = 1.0


def sample_snapshots(snapshots: Sequence[Snapshot], max_count: int) -> list[Snapshot]:
    """At most `max_count` of the usable snapshots, evenly spaced, within the memory of
    `MAX_NODE_PAIRS`."""
    useful = [each for each in snapshots if is_useful(each)]
    largest = max((len(each.nodes) for each in useful), default=1)
    count = min(len(useful), max_count, MAX_NODE_PAIRS // (2 * largest**2))
    if count == 0:
        return []
    return [useful[int(row)] for row in np.unique(np.linspace(0, len(useful) - 1, count).round())]


def make_scenarios(
    chosen: Sequence[Snapshot], history: Sequence[Snapshot], rng: np.random.Generator
) -> list[TuningScenario]:
    """`CLIENTS_PER_SNAPSHOT` scenarios per chosen snapshot of `history` (oldest first).

    Chains are chosen by the snapshot and the stability that the past shows; steps and failures are
    those of the following `SESSION_HORIZON_S`, or of the next snapshot if that comes later. There
    are none for a snapshot without a later one, or if no links connect its blocks.
    """
    past = _RecentHeights(history)
    found: list[TuningScenario] = []
    for snapshot in chosen:
        later = _later_snapshots(history, snapshot.taken_at)
        if not later:
            continue
        peers = [node.peer_id for node in snapshot.nodes]
        stability = node_stability(past.up_to(snapshot.taken_at), peers)
        hosts = [peers[int(row)] for row in rng.integers(len(peers), size=CLIENTS_PER_SNAPSHOT)]
        with suppress(MissingBlocksError):
            found.extend(_recorded_scenarios(snapshot, later, hosts, stability))
    return found


class _RecentHeights:
    """Connection heights of recorded snapshots, each computed once."""

    def __init__(self, history: Sequence[Snapshot]) -> None:
        self._history = history
        self._times = [snapshot.taken_at for snapshot in history]
        self._heights: dict[int, ConnectionHeights] = {}

    def up_to(self, at: float) -> list[ConnectionHeights]:
        end = bisect_right(self._times, at)
        return [self._at(row) for row in range(max(0, end - MAX_HEIGHTS), end)]

    def _at(self, row: int) -> ConnectionHeights:
        if row not in self._heights:
            self._heights[row] = connection_heights(self._history[row])
        return self._heights[row]


def _later_snapshots(history: Sequence[Snapshot], at: float) -> Sequence[Snapshot]:
    times = [snapshot.taken_at for snapshot in history]
    first, end = bisect_right(times, at), bisect_right(times, at + SESSION_HORIZON_S)
    rows = np.linspace(first, max(end, first + 1) - 1, MAX_OUTCOME_SNAPSHOTS).round()
    return [history[int(row)] for row in np.unique(rows) if row < len(history)]


def _recorded_scenarios(
    snapshot: Snapshot,
    later: Sequence[Snapshot],
    hosts: Sequence[PeerId],
    stability: Mapping[PeerId, float],
) -> Iterator[TuningScenario]:
    """A scenario for a client beside each of `hosts`; all share the arrays over pairs."""
    pairs: tuple[Floats, Floats] | None = None
    for host in hosts:
        request = replace(request_beside_node(snapshot, host), stability=stability)
        problem = build_problem(snapshot, request)
        seen = [build_problem(each, request_beside_node(each, host)) for each in later]
        outcome = mean_problem(problem, seen, host)
        if pairs is not None:
            problem = replace(problem, transfer_s_NN=pairs[0])
            outcome = replace(outcome, transfer_s_NN=pairs[1])
        pairs = problem.transfer_s_NN, outcome.transfer_s_NN
        failures_N = left_N(problem.peers, snapshot, later).astype(np.float64)
        yield TuningScenario.from_outcome(problem, outcome, failures_N)


def left_N(peers: Sequence[PeerId], before: Snapshot, later: Sequence[Snapshot]) -> Bools:
    """Whether each peer was gone or restarted in a later snapshot, [N].

    Planned exits count: snapshots do not tell them apart.
    """
    uptimes = {node.peer_id: node.uptime_s for node in before.nodes}
    left = np.zeros(len(peers), dtype=np.bool_)
    for snapshot in later:
        now = {node.peer_id: node.uptime_s for node in (*snapshot.nodes, *snapshot.joining)}
        left |= [now.get(peer, -math.inf) < uptimes[peer] for peer in peers]
    return left


def mean_problem(problem: ChainProblem, seen: Sequence[ChainProblem], host: PeerId) -> ChainProblem:
    """`problem` with the mean times of `seen`; unchanged for nodes that are in none of these.

    The way from and to the client counts where `host`, beside which it is, is there.
    """
    own = _step_times(problem)
    sums = {name: np.zeros_like(array) for name, array in own.items()}
    counts = {name: np.zeros_like(array) for name, array in own.items()}
    for each in seen:
        row = {peer: number for number, peer in enumerate(each.peers)}
        here = np.array([n for n, peer in enumerate(problem.peers) if peer in row], dtype=np.int64)
        there = np.array([row[problem.peers[n]] for n in here], dtype=np.int64)
        for name, array in _step_times(each).items():
            if name in ("entry_s_N", "exit_s_N") and host not in row:
                continue
            at, of = (
                (here, there) if array.ndim == 1 else (np.ix_(here, here), np.ix_(there, there))
            )
            sums[name][at] += array[of]
            counts[name][at] += 1.0
    means: dict[str, Any] = {
        name: np.divide(sums[name], counts[name], out=array.copy(), where=counts[name] > 0)
        for name, array in own.items()
    }
    return replace(problem, load_N=np.zeros(problem.num_nodes), **means)


def _step_times(problem: ChainProblem) -> dict[str, Floats]:
    """Times of a step by field, queueing within those of blocks."""
    return {
        "block_s_N": problem.busy_block_s_N,
        "entry_s_N": problem.entry_s_N,
        "exit_s_N": problem.exit_s_N,
        "transfer_s_NN": problem.transfer_s_NN,
    }


def request_beside_node(snapshot: Snapshot, host: PeerId) -> ChainRequest:
    """The request of a client beside the node `host`, with that node's round trips if it is there.

    Snapshots do not record where clients are.
    """
    request = ChainRequest(span=Span(0, snapshot.num_blocks))
    peers = [node.peer_id for node in snapshot.nodes]
    if snapshot.links is None or host not in peers:
        return request
    rtt_ms_NN, _ = snapshot.links.select_arrays(peers)
    entry_rtt_ms = np.maximum(rtt_ms_NN[peers.index(host)], _MIN_CLIENT_RTT_MS)
    return replace(request, entry_rtt_ms=entry_rtt_ms)


def is_useful(snapshot: Snapshot) -> bool:
    return snapshot.num_blocks > 0 and snapshot.links is not None and not snapshot.holes()
