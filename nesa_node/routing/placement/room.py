"""What a placement is made from: what nodes can do, and how many blocks each could hold.

N nodes, B blocks. A node's span is its `starts_N` and `ends_N`; equal ones mean that it holds
nothing. More blocks on a node never make a plan worse (a chain may use a part of a span), so that
planners give every node as many as fit, and choose only where its span starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.span import Span
from nesa_node.routing.problem import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """A problem whose spans are yet to be chosen.

    `problem` says what nodes hold now. `most_N` blocks fit into each, at most all of the model's.
    `replicas` holders are wanted for every block. `others`: the same problem as other clients have
    it, who differ in the ways to the first node and from the last.
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
        """What each node adds to the swarm's speed, as often as it is there."""
        return self.problem.reliability_N / np.maximum(self.problem.block_s_N, 1e-12)

    @property
    def clients(self) -> tuple[Problem, ...]:
        return (self.problem, *self.others)

    def seen_by(self, client: int) -> Room:
        """The same for that client alone."""
        return Room(self.clients[client], self.most_N, self.replicas)

    def widest(self, starts_N: Ints) -> Layout:
        """Every node holds all that fits into it, from `starts_N` on."""
        return Layout(starts_N, starts_N + self.most_N)

    def now(self) -> Layout:
        """What nodes hold at present."""
        return Layout(self.problem.starts_N, self.problem.ends_N)

    def problem_of(self, layout: Layout, client: int = 0) -> Problem:
        """The choice of chains that `layout` would give to that client."""
        problem = self.clients[client]
        return replace(problem, starts_N=layout.starts_N, ends_N=layout.ends_N)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A span for every node of a room."""

    starts_N: Ints
    ends_N: Ints

    def holders_B(self, num_blocks: int) -> Ints:
        """How many nodes hold each block."""
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
        """The same with another span for `node`."""
        starts_N, ends_N = self.starts_N.copy(), self.ends_N.copy()
        starts_N[node], ends_N[node] = span.start, span.end
        return Layout(starts_N, ends_N)


@dataclass(frozen=True, slots=True, order=True)
class Lacks:
    """What a layout fails at, the worse first: blocks nobody holds, and replicas missing."""

    holes: int
    replicas: int
