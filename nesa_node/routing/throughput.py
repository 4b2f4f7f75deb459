"""The chain that leaves most room for others: the shortest path at marginal prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nesa_node.routing.exact import exact_latency
from nesa_node.routing.problem import Chain, Floats, Problem

FULL = 0.98
"""From this load on the price grows in proportion to the load: it stays finite, and in order."""

COMPUTE_WEIGHT = 30.0
"""How many seconds on the way a second of a node's time is worth. Transfers use up nobody's
capacity: they decide between nodes that are about as idle, and keep chains short."""


def exact_throughput(problem: Problem) -> Chain:
    """The chain with the least sum of marginal prices. Raises as `exact_latency` does.

    Latency's own program always takes the fastest nodes, even when they are nearly full. What one
    more session costs everybody on a node with load x is about the derivative of x / (1 - x), the
    queue's length: seconds / (1 - x)^2.
    """
    return exact_latency(priced(problem))


def priced(problem: Problem) -> Problem:
    """`problem` with each block at its marginal price, in seconds."""
    price_N = COMPUTE_WEIGHT * problem.block_s_N * price_factor(problem.load_N)
    return replace(problem, block_s_N=price_N, load_N=np.zeros_like(price_N))


def price_factor(load_N: Floats) -> Floats:
    """1 / (1 - load)^2, growing on in proportion to the load where that would not end."""
    below_N = np.minimum(load_N, FULL)
    factor_N: Floats = 1.0 / (1.0 - below_N) ** 2 * np.maximum(load_N / FULL, 1.0)
    return factor_N
