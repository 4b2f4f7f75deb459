"""Fitness of the greedy rule's parameters: step times of its chains relative to the optimum.

K draws of failures, N nodes. Eq. 19 uses the rule's own cost as fitness; minimising that over the
exponents drives them to their bounds, since it shrinks small terms and does not measure the chains.
So fitness here is measured on the chains, failures and recoveries included: without those nothing
could be learned about alpha.
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
"""Sessions per scenario for which failures are drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A problem with the inputs shared by all candidates, its optimum and drawn failures.

    `failures_N`: share of the K drawn sessions that each node interrupts.
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
        """A scenario of `problem`, with failures drawn from `present_N`.

        `present_N`: the probability that a node stays for a session, by default its reliability.
        Raises `MissingBlocksError`.
        """
        chance_N = problem.reliability_N if present_N is None else present_N
        optimum_s = terms(problem, exact_latency(problem)).total_s
        fails_KN = rng.random((draws, problem.num_nodes)) >= chance_N
        return cls(Prepared.of(problem), optimum_s, fails_KN.mean(axis=0))

    def ratio(self, chain: Chain) -> float:
        """Time through `chain`, recoveries included, over the optimum without failures."""
        nodes = [visit.node for visit in chain]
        lost_s = RECOVERY_S * float(self.failures_N[nodes].sum()) / TOKENS
        return (terms(self.prepared.problem, chain).total_s + lost_s) / self.optimum_s


def ratios(parameters: Parameters, scenarios: Sequence[Scenario]) -> Floats:
    """`Scenario.ratio` of the chain that the rule picks in each scenario."""
    chains = (GreedyRule(scenario.prepared, parameters).choose() for scenario in scenarios)
    pairs = zip(scenarios, chains, strict=True)
    return np.array([scenario.ratio(chain) for scenario, chain in pairs])


def fitness(parameters: Parameters, scenarios: Sequence[Scenario]) -> float:
    """The mean of `ratios`: 1 is the optimum without failures, less is better."""
    return float(ratios(parameters, scenarios).mean())
