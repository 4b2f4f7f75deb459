"""Scores of assignments: coverage deficit, latency and throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.exact import exact_latency
from nesa_node.routing.placement.flow import measure_flow
from nesa_node.routing.placement.room import Lacks, Layout, Room
from nesa_node.routing.problem import Chain, Problem, terms

Goal = Literal["latency", "throughput"]

MANY_NODES = 1000
SAME = 0.01
"""Relative difference of costs below which the other goal decides: estimates are that uncertain."""


@dataclass(frozen=True, slots=True)
class Score:
    """Coverage deficit, latency and throughput of an assignment.

    `latency_s`: step time of the best chain, the mean over clients; inf without a chain.
    """

    lacks: Lacks
    latency_s: float
    steps_per_s: float

    def cost(self, goal: Goal) -> float:
        """Seconds per step: the latency, or the inverse of the throughput."""
        if goal == "latency":
            return self.latency_s
        return 1.0 / self.steps_per_s if self.steps_per_s > 0 else np.inf

    def better(self, other: Score, goal: Goal) -> bool:
        """Whether this is better: fewer holes, then fewer missing replicas, then the goal."""
        if self.lacks != other.lacks:
            return self.lacks < other.lacks
        mine, theirs = self.cost(goal), other.cost(goal)
        if mine < theirs * (1 - SAME) or theirs < mine * (1 - SAME):
            return mine < theirs
        side: Goal = "throughput" if goal == "latency" else "latency"
        return (self.cost(side), mine) < (other.cost(side), theirs)


def measure(room: Room, layout: Layout) -> Score:
    flow = measure_flow(layout, room.blocks_per_s_N, room.problem.num_blocks)
    latencies_s = [
        latency_s(room.problem_of(layout, client)) for client in range(len(room.clients))
    ]
    return Score(layout.lacks(room), float(np.mean(latencies_s)), flow.steps_per_s)


def latency_s(problem: Problem) -> float:
    """Step time of the best chain in seconds; inf if there is none."""
    chain = best_chain(problem)
    return terms(problem, chain).total_s if chain is not None else np.inf


def best_chain(problem: Problem) -> Chain | None:
    """The fastest chain through the spans, None if there is no chain."""
    try:
        return exact_latency(problem)
    except MissingBlocksError:
        return None
