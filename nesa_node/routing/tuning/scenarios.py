"""Fitness of the greedy rule's parameters: step times of its chains relative to the optimum.

K draws of failures, N nodes. Eq. 19 uses the rule's own cost as fitness; minimising that over the
exponents drives them to their bounds, since it shrinks small terms and does not measure the chains.
So fitness here is measured on the chains, failures and recoveries included: without those nothing
could be learned about alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest, build_problem
from nesa_node.routing.problem import RECOVERY_S, TOKENS_PER_SESSION, Chain, ChainProblem, step_time
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import GreedyInputs, GreedyParameters, GreedyRule
from nesa_node.topology.snapshot import Snapshot

FAILURE_DRAWS = 32
"""Sessions per scenario for which failures are drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningScenario:
    """A problem with the inputs shared by all candidates, its optimum and drawn failures.

    `failures_N`: share of the K drawn sessions that each node interrupts.
    """

    prepared: GreedyInputs
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
        """A scenario of `problem`; a node's reliability is the chance that it stays for a session.

        Raises `MissingBlocksError`.
        """
        optimum_s = step_time(problem, exact_latency(problem)).total_s
        fails_KN = rng.random((draws, problem.num_nodes)) >= problem.reliability_N
        return cls(GreedyInputs.from_problem(problem), optimum_s, fails_KN.mean(axis=0))

    def time_ratio(self, chain: Chain) -> float:
        """Time through `chain`, recoveries included, over the optimum without failures."""
        nodes = [visit.node for visit in chain]
        lost_s = RECOVERY_S * float(self.failures_N[nodes].sum()) / TOKENS_PER_SESSION
        return (step_time(self.prepared.problem, chain).total_s + lost_s) / self.optimum_s


def time_ratios(parameters: GreedyParameters, scenarios: Sequence[TuningScenario]) -> Floats:
    """`TuningScenario.time_ratio` of the chain that the rule picks in each scenario."""
    chains = (GreedyRule(scenario.prepared, parameters).choose() for scenario in scenarios)
    pairs = zip(scenarios, chains, strict=True)
    return np.array([scenario.time_ratio(chain) for scenario, chain in pairs])


def fitness(parameters: GreedyParameters, scenarios: Sequence[TuningScenario]) -> float:
    """The mean of `time_ratios`: 1 is the optimum without failures, less is better."""
    return float(time_ratios(parameters, scenarios).mean())


MAX_NODE_PAIRS = 16_000_000
"""Pairs of nodes in all scenarios that are in memory at once, at 8 bytes each."""
CLIENTS_PER_SNAPSHOT = 3
"""Clients per snapshot: the result of a single one depends too much on its position."""
_MIN_CLIENT_RTT_MS = 1.0


def sample_snapshots(snapshots: Sequence[Snapshot], max_count: int) -> list[Snapshot]:
    """At most `max_count` of the usable snapshots, evenly spaced, within the memory of
    `MAX_NODE_PAIRS`."""
    useful = [each for each in snapshots if _is_useful(each)]
    largest = max((len(each.nodes) for each in useful), default=1)
    count = min(len(useful), max_count, MAX_NODE_PAIRS // (CLIENTS_PER_SNAPSHOT * largest**2))
    if count == 0:
        return []
    return [useful[int(row)] for row in np.unique(np.linspace(0, len(useful) - 1, count).round())]


def make_scenarios(snapshots: Sequence[Snapshot], rng: np.random.Generator) -> list[TuningScenario]:
    """`CLIENTS_PER_SNAPSHOT` scenarios per snapshot; none if no links connect its blocks."""
    found = []
    for snapshot in snapshots:
        for _ in range(CLIENTS_PER_SNAPSHOT):
            problem = build_problem(snapshot, request_beside_node(snapshot, rng))
            with suppress(MissingBlocksError):
                found.append(TuningScenario.from_problem(problem, rng))
    return found


def request_beside_node(snapshot: Snapshot, rng: np.random.Generator) -> ChainRequest:
    """The request of a client beside a random node, with that node's round trips.

    Snapshots do not record where clients are.
    """
    request = ChainRequest(span=Span(0, snapshot.num_blocks))
    if snapshot.links is None:
        return request
    rtt_ms_NN, _ = snapshot.links.select_arrays([node.peer_id for node in snapshot.nodes])
    host = int(rng.integers(len(snapshot.nodes)))
    return replace(request, entry_rtt_ms=np.maximum(rtt_ms_NN[host], _MIN_CLIENT_RTT_MS))


def _is_useful(snapshot: Snapshot) -> bool:
    return snapshot.num_blocks > 0 and snapshot.links is not None and not snapshot.holes()
