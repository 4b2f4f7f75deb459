"""The placement problem (nodes with capacities) and its solutions (spans of nodes).

N nodes, B blocks. A node's span is `starts_N` to `ends_N`; equal values mean no blocks. More blocks
on a node never make a placement worse (a chain may use a part of a span), so that planners fill
every node and choose only the start of its span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.span import Span
from nesa_node.routing.problem import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """The choice of a span for every node.

    `problem`: the nodes with their present spans. `most_N`: capacity of each node in blocks, at
    most those of the model. `replicas`: holders wanted per block. `others`: the same problem for
    further clients, with their own entry and exit times.
    """

    problem: Problem
    most_N: Ints
    replicas: int = 1
    others: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        if self.most_N.shape != (self.problem.num_nodes,):
            raise ValueError(
                f"most_N must have shape {(self.problem.num_nodes,)}, got {self.most_N.shape}"
            )
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        most_N = np.clip(self.most_N, 0, self.problem.num_blocks).astype(np.int64)
        object.__setattr__(self, "most_N", most_N)

    @property
    def blocks_per_s_N(self) -> Floats:
        """Blocks per second of each idle node, times its reliability."""
        return self.problem.reliability_N / np.maximum(self.problem.block_s_N, 1e-12)

    @property
    def clients(self) -> tuple[Problem, ...]:
        return (self.problem, *self.others)

    def seen_by(self, client: int) -> Room:
        """The same problem for client number `client` alone."""
        return Room(self.clients[client], self.most_N, self.replicas)

    def widest(self, starts_N: Ints) -> Layout:
        """Spans of full capacity from `starts_N` on."""
        return Layout(starts_N, starts_N + self.most_N)

    def now(self) -> Layout:
        """The present spans."""
        return Layout(self.problem.starts_N, self.problem.ends_N)

    def problem_of(self, layout: Layout, client: int = 0) -> Problem:
        """The chain problem of a client under `layout`."""
        problem = self.clients[client]
        return replace(problem, starts_N=layout.starts_N, ends_N=layout.ends_N)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A span for every node of a placement problem."""

    starts_N: Ints
    ends_N: Ints

    def holders_B(self, num_blocks: int) -> Ints:
        """The number of holders of each block, int64 [B]."""
        steps = np.zeros(num_blocks + 1, dtype=np.int64)
        np.add.at(steps, np.minimum(self.starts_N, num_blocks), 1)
        np.add.at(steps, np.minimum(self.ends_N, num_blocks), -1)
        return np.cumsum(steps)[:num_blocks]

    def lacks(self, room: Room) -> Lacks:
        holders_B = self.holders_B(room.problem.num_blocks)
        missing_B = np.maximum(room.replicas - holders_B, 0)
        return Lacks(int((holders_B == 0).sum()), int(missing_B.sum()))

    def span(self, node: int) -> Span:
        return Span(int(self.starts_N[node]), int(self.ends_N[node]))

    def moved(self, node: int, span: Span) -> Layout:
        """A copy with another span for `node`."""
        starts_N, ends_N = self.starts_N.copy(), self.ends_N.copy()
        starts_N[node], ends_N[node] = span.start, span.end
        return Layout(starts_N, ends_N)


@dataclass(frozen=True, slots=True, order=True)
class Lacks:
    """Coverage deficit: blocks without a holder, then missing replicas; ordered in that order."""

    holes: int
    replicas: int
