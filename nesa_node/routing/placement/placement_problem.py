"""The placement problem (nodes with capacities) and its solutions (spans of nodes).

N nodes, B blocks, D failure domains. A node's span is `starts_N` to `ends_N`; equal values mean no
blocks. More blocks on a node never make a placement worse (a chain may use a part of a span), so
that planners fill every node and choose only the start of its span.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainProblem, ChainRequest, NodeValues, build_problem
from nesa_node.topology.predicted_speeds import predict_speeds
from nesa_node.topology.shape.failure_domains import failure_domains, members_DN
from nesa_node.topology.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class FixedHolders:
    """Nodes beside those of a problem, which keep their spans (`large_plan.py`).

    `holders_B`, `inside_DB`: how many hold each block, in all and in each failure domain; all of
    them serve. `speed_SE`: total blocks/s of those with span s:e, [B + 1, B + 1].
    """

    holders_B: Ints
    inside_DB: Ints
    speed_SE: Floats

    @classmethod
    def none(cls, num_blocks: int, num_domains: int) -> FixedHolders:
        nothing_B = np.zeros(num_blocks, dtype=np.int64)
        inside_DB = np.zeros((num_domains, num_blocks), dtype=np.int64)
        size = num_blocks + 1
        return cls(nothing_B, inside_DB, np.zeros((size, size)))

    def speed_B(self) -> Floats:
        """Blocks/s per block if each node divides its time evenly among its blocks."""
        start_H, end_H = np.nonzero(self.speed_SE)
        share_H = self.speed_SE[start_H, end_H] / (end_H - start_H)
        steps = np.zeros(len(self.holders_B) + 1)
        np.add.at(steps, start_H, share_H)
        np.add.at(steps, end_H, -share_H)
        return np.maximum(np.cumsum(steps)[:-1], 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """The choice of a span for every node.

    `problem`: the nodes with their present spans. `max_blocks_N`: capacity of each node in blocks,
    at most those of the model. `replicas`: holders wanted per block. `other_clients`: the same
    problem for further clients, with their own entry and exit times. `domains_DN`: which nodes may
    fail together. `fixed`: what other nodes hold, if any.
    """

    problem: ChainProblem
    max_blocks_N: Ints
    replicas: int = 1
    other_clients: tuple[ChainProblem, ...] = ()
    domains_DN: Bools = field(default_factory=lambda: np.zeros((0, 0), dtype=np.bool_))
    fixed: FixedHolders | None = None

    def __post_init__(self) -> None:
        if self.max_blocks_N.shape != (self.problem.num_nodes,):
            raise ValueError(
                f"max_blocks_N must have shape {(self.problem.num_nodes,)}, got "
                f"{self.max_blocks_N.shape}"
            )
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if not len(self.domains_DN):
            object.__setattr__(self, "domains_DN", np.zeros((0, self.problem.num_nodes), np.bool_))
        most_N = np.clip(self.max_blocks_N, 0, self.problem.num_blocks).astype(np.int64)
        object.__setattr__(self, "max_blocks_N", most_N)

    @property
    def blocks_per_s_N(self) -> Floats:
        """Blocks per second of each idle node, times its reliability."""
        return self.problem.reliability_N / np.maximum(self.problem.block_s_N, 1e-12)

    @property
    def others(self) -> FixedHolders:
        """What other nodes hold, `fixed` or nothing."""
        return self.fixed or FixedHolders.none(self.problem.num_blocks, len(self.domains_DN))

    @property
    def client_problems(self) -> tuple[ChainProblem, ...]:
        return (self.problem, *self.other_clients)

    def for_client(self, client: int) -> PlacementProblem:
        """The same problem for client number `client` alone."""
        return PlacementProblem(self.client_problems[client], self.max_blocks_N, self.replicas)

    def assign_full_spans(self, starts_N: Ints) -> Assignment:
        """Spans of full capacity from `starts_N` on."""
        return Assignment(starts_N, starts_N + self.max_blocks_N)

    def current_assignment(self) -> Assignment:
        """The present spans."""
        return Assignment(self.problem.starts_N, self.problem.ends_N)

    def chain_problem(self, assignment: Assignment, client: int = 0) -> ChainProblem:
        """The chain problem of a client under `assignment`."""
        problem = self.client_problems[client]
        return replace(problem, starts_N=assignment.starts_N, ends_N=assignment.ends_N)


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A span for every node of a placement problem."""

    starts_N: Ints
    ends_N: Ints

    def count_holders_B(self, num_blocks: int) -> Ints:
        """The number of holders of each block, int64 [B]."""
        steps = np.zeros(num_blocks + 1, dtype=np.int64)
        np.add.at(steps, np.minimum(self.starts_N, num_blocks), 1)
        np.add.at(steps, np.minimum(self.ends_N, num_blocks), -1)
        return np.cumsum(steps)[:num_blocks]

    def deficit(self, instance: PlacementProblem) -> CoverageDeficit:
        holders_B = self.count_holders_B(instance.problem.num_blocks) + instance.others.holders_B
        missing_B = np.maximum(instance.replicas - holders_B, 0)
        return CoverageDeficit(int((holders_B == 0).sum()), int(missing_B.sum()))

    def holds_NB(self, num_blocks: int) -> Bools:
        """Whether each node holds each block."""
        blocks_B = np.arange(num_blocks)
        held: Bools = (self.starts_N[:, None] <= blocks_B) & (blocks_B < self.ends_N[:, None])
        return held

    def count_exposed(self, instance: PlacementProblem) -> int:
        """Pairs of a block and a failure domain that contains all holders of the block."""
        holds_NB = self.holds_NB(instance.problem.num_blocks).astype(np.float32)
        inside_DB = instance.domains_DN.astype(np.float32) @ holds_NB + instance.others.inside_DB
        holders_B = holds_NB.sum(axis=0) + instance.others.holders_B
        return int(count_exposed_B(inside_DB, holders_B).sum())

    def span(self, node: int) -> Span:
        return Span(int(self.starts_N[node]), int(self.ends_N[node]))

    def with_span(self, node: int, span: Span) -> Assignment:
        """A copy with another span for `node`."""
        starts_N, ends_N = self.starts_N.copy(), self.ends_N.copy()
        starts_N[node], ends_N[node] = span.start, span.end
        return Assignment(starts_N, ends_N)

    def without(self, nodes: Collection[int]) -> Assignment:
        """A copy in which `nodes` hold nothing."""
        starts_N, ends_N = self.starts_N.copy(), self.ends_N.copy()
        starts_N[[*nodes]] = ends_N[[*nodes]] = 0
        return Assignment(starts_N, ends_N)


@dataclass(frozen=True, slots=True, order=True)
class CoverageDeficit:
    """Coverage deficit: blocks without a holder, then missing replicas; ordered in that order."""

    holes: int
    replicas: int


def make_placement_problem(
    snapshot: Snapshot, requests: ChainRequest | Sequence[ChainRequest], *, replicas: int = 1
) -> PlacementProblem:
    """The placement problem of `snapshot`: its serving nodes, then its joining ones.

    It covers the whole model, whatever span the requests run, and includes nodes whose cache is
    full; nodes excluded by the first request are left out. A node that does not announce its
    capacity keeps the number of blocks that it holds. A node without blocks gets its announced
    speed as that of a single block. A node that has measured no speed gets that of its roofline,
    where it announces one. Each request is one client.
    """
    first, *others = [requests] if isinstance(requests, ChainRequest) else requests
    if snapshot.num_blocks < 1:
        raise ValueError("a model without blocks needs no placement")
    everyone = predict_speeds((*snapshot.nodes, *snapshot.joining))
    whole = Span(0, snapshot.num_blocks)
    pretended = replace(
        snapshot, nodes=tuple(node.with_span(whole) for node in everyone), joining=()
    )
    asked = _for_all_nodes(first, whole, len(snapshot.joining))
    problem = build_problem(pretended, asked)
    nodes = {node.peer_id: node for node in everyone}
    held = [nodes[peer] for peer in problem.peers]
    spans = [_clip_span(node.span, snapshot.num_blocks) for node in held]
    problem = replace(
        problem,
        starts_N=np.array([span.start for span in spans], dtype=np.int64),
        ends_N=np.array([span.end for span in spans], dtype=np.int64),
    )
    most = [node.max_blocks or len(span) for node, span in zip(held, spans, strict=True)]
    return PlacementProblem(
        problem,
        np.array(most, dtype=np.int64),
        replicas,
        tuple(
            _with_client_links(
                problem, pretended, _for_all_nodes(request, whole, len(snapshot.joining)), asked
            )
            for request in others
        ),
        members_DN(failure_domains(snapshot), problem.peers),
    )


def _for_all_nodes(request: ChainRequest, span: Span, joining: int) -> ChainRequest:
    return replace(
        request,
        span=span,
        min_free_tokens=0,
        entry_rtt_ms=_pad_values(request.entry_rtt_ms, joining),
        entry_bytes_per_s=_pad_values(request.entry_bytes_per_s, joining),
        exit_bytes_per_s=_pad_values(request.exit_bytes_per_s, joining),
    )


def _with_client_links(
    problem: ChainProblem, snapshot: Snapshot, request: ChainRequest, first: ChainRequest
) -> ChainProblem:
    """`problem` with the links to and from the client of `request`."""
    asked = replace(request, exclude=first.exclude)
    ends = build_problem(replace(snapshot, links=None), asked)
    return replace(problem, entry_s_N=ends.entry_s_N, exit_s_N=ends.exit_s_N)


def count_exposed_B(inside_DB: NDArray[Any], holders_B: NDArray[Any]) -> Ints:
    """The number of failure domains, with `inside_DB` holders in each, that have all holders."""
    return np.asarray(((inside_DB == holders_B) & (holders_B > 0)).sum(axis=0))


def window_sums(values_B: Floats, width: int) -> Floats:
    """The sums of all windows of `width` blocks."""
    sums = np.concatenate(([0.0], np.cumsum(values_B)))
    return sums[width:] - sums[:-width]


def _clip_span(span: Span, num_blocks: int) -> Span:
    return Span(min(span.start, num_blocks), min(span.end, num_blocks))


def _pad_values(values: NodeValues, more: int) -> NodeValues:
    if values is None or isinstance(values, Mapping):
        return values
    return np.concatenate([values, np.full(more, np.nan)])
