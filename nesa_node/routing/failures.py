"""What lost nodes cost: the time that a session loses to failures, spread over its tokens.

N nodes. A node that is gone before the session ends stops it once, until another has taken its
place. So a visit costs, beside its own time, the chance of that times what a recovery takes,
divided by the tokens that share it. `benchmarks routing` says what it does to latency.
"""

from __future__ import annotations

from dataclasses import replace

from nesa_node.routing.problem import Chain, Floats, Problem

TOKENS = 200
"""Of a session, which a failure interrupts."""
RECOVERY_S = 10.0
"""What a lost node costs a session: notice it, find another, replay the cache
(`python -m benchmarks churn`)."""


def lost_s(problem: Problem) -> Floats:
    """[N] seconds per token that a visit to each node is expected to lose."""
    seconds_N: Floats = (1.0 - problem.reliability_N) * (RECOVERY_S / TOKENS)
    return seconds_N


def with_failures(problem: Problem) -> Problem:
    """`problem` in which every visit costs what it is expected to lose, too."""
    return replace(problem, visit_s_N=problem.visit_s_N + lost_s(problem))


def chain_lost_s(problem: Problem, chain: Chain) -> float:
    """Seconds per token that a session through `chain` is expected to lose."""
    return float(lost_s(problem)[[visit.node for visit in chain]].sum()) if chain else 0.0
