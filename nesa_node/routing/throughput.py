"""The chain that costs the swarm least capacity: the shortest path at marginal prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nesa_node.routing.exact import exact_latency
from nesa_node.routing.problem import Chain, Floats, Problem

FULL = 0.98
"""Load above which the price grows linearly, so that it stays finite and monotonic."""

COMPUTE_WEIGHT = 30.0
"""Weight of a second of compute relative to a second of transfer. Transfers use no compute
capacity: they decide between nodes of similar load, and keep chains short."""


def exact_throughput(problem: Problem) -> Chain:
    """The chain with the least sum of marginal prices. Raises as `exact_latency` does.

    The shortest chain uses the fastest nodes even if they are nearly full. One more session on a
    node with load x delays all its sessions by about the derivative of the queue's length
    x / (1 - x): seconds / (1 - x)^2.
    """
    return exact_latency(priced(problem))


def priced(problem: Problem) -> Problem:
    """`problem` with each block at its marginal price, in seconds."""
    price_N = COMPUTE_WEIGHT * problem.block_s_N * price_factor(problem.load_N)
    return replace(problem, block_s_N=price_N, load_N=np.zeros_like(price_N))


def price_factor(load_N: Floats) -> Floats:
    """1 / (1 - load)^2 up to `FULL`, linear in the load above."""
    below_N = np.minimum(load_N, FULL)
    factor_N: Floats = 1.0 / (1.0 - below_N) ** 2 * np.maximum(load_N / FULL, 1.0)
    return factor_N
