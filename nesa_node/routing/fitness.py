"""How good parameters of the greedy rule are: times of real chains against the best there are.

K draws of failures, N nodes. Eq. 19 takes the rule's own cost for a fitness; minimising that over
its exponents drives them to their bounds, since it makes small terms smaller and says nothing of
what the chains are worth. So this measures the chains, failures and recoveries included: without
those nothing could be learned about alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.routing.exact import exact_latency
from nesa_node.routing.greedy import GreedyRule, Parameters, Prepared
from nesa_node.routing.problem import Chain, Floats, Problem, terms

TOKENS = 200
"""Of a session, which a failure interrupts."""
RECOVERY_S = 10.0
"""What a lost node costs a session: notice it, find another, replay the cache
(`python -m benchmarks churn`)."""
DRAWS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A problem, what all candidates share of it, its optimum, and which nodes will fail.

    `failures_N` is how many of the K sessions that were drawn each node interrupts, over K.
    """

    prepared: Prepared
    optimum_s: float
    failures_N: Floats

    @classmethod
    def of(cls, problem: Problem, rng: np.random.Generator, *, draws: int = DRAWS) -> Scenario:
        """Failures are drawn from the nodes' reliability. Raises `MissingBlocksError`."""
        optimum_s = terms(problem, exact_latency(problem)).total_s
        fails_KN = rng.random((draws, problem.num_nodes)) >= problem.reliability_N
        return cls(Prepared.of(problem), optimum_s, fails_KN.mean(axis=0))

    def ratio(self, chain: Chain) -> float:
        """A session's time through `chain`, recoveries included, over the best without failures."""
        nodes = [visit.node for visit in chain]
        lost_s = RECOVERY_S * float(self.failures_N[nodes].sum()) / TOKENS
        return (terms(self.prepared.problem, chain).total_s + lost_s) / self.optimum_s


def fitness(parameters: Parameters, scenarios: Sequence[Scenario]) -> float:
    """The mean ratio of the chains that the rule picks: 1 is perfect, less is better."""
    ratios = [
        scenario.ratio(GreedyRule(scenario.prepared, parameters).choose()) for scenario in scenarios
    ]
    return float(np.mean(ratios))
