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
from nesa_node.routing.failures import RECOVERY_S, TOKENS
from nesa_node.routing.greedy import GreedyRule, Parameters, Prepared
from nesa_node.routing.problem import Chain, Floats, Problem, terms

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
    def of(
        cls,
        problem: Problem,
        rng: np.random.Generator,
        *,
        present_N: Floats | None = None,
        draws: int = DRAWS,
    ) -> Scenario:
        """Failures are drawn from `present_N`, the chance that a node stays for a session.

        By default that is its reliability; of a recorded snapshot, what came after it may tell
        better. Raises `MissingBlocksError`.
        """
        chance_N = problem.reliability_N if present_N is None else present_N
        optimum_s = terms(problem, exact_latency(problem)).total_s
        fails_KN = rng.random((draws, problem.num_nodes)) >= chance_N
        return cls(Prepared.of(problem), optimum_s, fails_KN.mean(axis=0))

    def ratio(self, chain: Chain) -> float:
        """A session's time through `chain`, recoveries included, over the best without failures."""
        nodes = [visit.node for visit in chain]
        lost_s = RECOVERY_S * float(self.failures_N[nodes].sum()) / TOKENS
        return (terms(self.prepared.problem, chain).total_s + lost_s) / self.optimum_s


def ratios(parameters: Parameters, scenarios: Sequence[Scenario]) -> Floats:
    """`Scenario.ratio` of the chain that the rule picks in each."""
    chains = (GreedyRule(scenario.prepared, parameters).choose() for scenario in scenarios)
    pairs = zip(scenarios, chains, strict=True)
    return np.array([scenario.ratio(chain) for scenario, chain in pairs])


def fitness(parameters: Parameters, scenarios: Sequence[Scenario]) -> float:
    """Their mean: 1 is perfect, less is better."""
    return float(ratios(parameters, scenarios).mean())
