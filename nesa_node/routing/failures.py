"""Expected cost of node failures: the time a session loses to recoveries, per token.

N nodes. A node that fails before the session ends interrupts it once, until a replacement has taken
over. So a visit costs, beside its own time, the probability of failure times the recovery time,
divided by the tokens of the session. `benchmarks routing` measures the effect on latency.
"""

from __future__ import annotations

from dataclasses import replace

from nesa_node.routing.problem import Chain, Floats, Problem

TOKENS = 200
"""Assumed tokens of a session, over which a recovery is spread."""
RECOVERY_S = 10.0
"""Seconds to recover from a lost node: detect it, find a replacement, replay the cache
(`python -m benchmarks churn`)."""


def lost_s(problem: Problem) -> Floats:
    """Expected seconds lost per token by a visit to each node, float64 [N].

    A node that fails interrupts the session once, until a replacement has taken over: the loss is
    the probability of failure times the recovery time, divided by the tokens of the session.
    """
    seconds_N: Floats = (1.0 - problem.reliability_N) * (RECOVERY_S / TOKENS)
    return seconds_N


def with_failures(problem: Problem) -> Problem:
    """`problem` with the expected loss added to the cost of each visit."""
    return replace(problem, visit_s_N=problem.visit_s_N + lost_s(problem))


def chain_lost_s(problem: Problem, chain: Chain) -> float:
    """Expected seconds lost per token by a session through `chain`."""
    return float(lost_s(problem)[[visit.node for visit in chain]].sum()) if chain else 0.0
