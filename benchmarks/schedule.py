"""Chunks of a prompt that follow each other through the nodes of a chain, on paper.

Node n begins chunk i once it has done chunk i - 1 and node n - 1 has done chunk i; transfers take
no time. Measured times of each chunk on each node go in, so that the machine that measures needs no
core for every node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Schedule:
    """`starts[n][i]` and `ends[n][i]` are seconds from the start of the first chunk."""

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        return self.ends[-1][-1]

    @property
    def busy_s(self) -> list[float]:
        """Of each node."""
        return [
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def bubble_share(self) -> float:
        """The share of the whole time in which even the busiest node has nothing to do.

        What filling and emptying the pipeline costs, however unequal the nodes are.
        """
        return 1 - max(self.busy_s) / self.makespan_s

    @property
    def idle_share(self) -> float:
        """The share of all nodes' time, from the first start to the last end, that is idle.

        With equal nodes this is `bubble_share`; nodes with less to do add to it.
        """
        return 1 - sum(self.busy_s) / (len(self.starts) * self.makespan_s)

    @property
    def idle_within(self) -> list[float]:
        """Of each node: the idle share between its first chunk's start and its last one's end."""
        return [
            1 - busy / (ends[-1] - starts[0])
            for starts, ends, busy in zip(self.starts, self.ends, self.busy_s, strict=True)
        ]

    @property
    def speedup(self) -> float:
        """How much faster than one node that does everything."""
        return sum(self.busy_s) / self.makespan_s

    def as_json(self) -> dict[str, Any]:
        return {
            "makespan_s": self.makespan_s,
            "bubble_share": self.bubble_share,
            "idle_share": self.idle_share,
            "idle_within": self.idle_within,
            "speedup": self.speedup,
        }


def schedule(seconds: Sequence[Sequence[float]]) -> Schedule:
    """The schedule of chunks that take `seconds[n][i]` on node n."""
    starts: list[tuple[float, ...]] = []
    ends: list[tuple[float, ...]] = []
    arrivals: Sequence[float] = [0.0] * len(seconds[0])
    for of_node in seconds:
        begun, done, free = [], [], 0.0
        for arrival, duration in zip(arrivals, of_node, strict=True):
            begun.append(max(arrival, free))
            free = begun[-1] + duration
            done.append(free)
        starts.append(tuple(begun))
        ends.append(tuple(done))
        arrivals = done
    return Schedule(tuple(starts), tuple(ends))
