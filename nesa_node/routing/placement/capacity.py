"""Placement problems made from snapshots: capacity and speed of each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from nesa_node.core.span import Span
from nesa_node.routing.build import PerNode, Request, build_problem
from nesa_node.routing.placement.room import Room
from nesa_node.routing.problem import Problem
from nesa_node.topology.snapshot import NodeState, Snapshot


def make_room(
    snapshot: Snapshot, requests: Request | Sequence[Request], *, replicas: int = 1
) -> Room:
    """The placement problem of `snapshot`: its serving nodes, then its joining ones.

    It covers the whole model, whatever span the requests run, and includes nodes whose cache is
    full; nodes excluded by the first request are left out. A node that does not announce its
    capacity keeps the number of blocks that it holds. A node without blocks gets its announced
    speed as that of a single block. Each request is one client.
    """
    first, *others = [requests] if isinstance(requests, Request) else requests
    if snapshot.num_blocks < 1:
        raise ValueError("a model without blocks needs no placement")
    everyone = (*snapshot.nodes, *snapshot.joining)
    whole = Span(0, snapshot.num_blocks)
    pretended = replace(
        snapshot, nodes=tuple(_holding(node, whole) for node in everyone), joining=()
    )
    asked = _of_everyone(first, whole, len(snapshot.joining))
    problem = build_problem(pretended, asked)
    nodes = {node.peer_id: node for node in everyone}
    held = [nodes[peer] for peer in problem.peers]
    spans = [_cut(node.span, snapshot.num_blocks) for node in held]
    problem = replace(
        problem,
        starts_N=np.array([span.start for span in spans], dtype=np.int64),
        ends_N=np.array([span.end for span in spans], dtype=np.int64),
    )
    most = [node.max_blocks or len(span) for node, span in zip(held, spans, strict=True)]
    return Room(
        problem,
        np.array(most, dtype=np.int64),
        replicas,
        tuple(
            _with_ends(
                problem, pretended, _of_everyone(request, whole, len(snapshot.joining)), asked
            )
            for request in others
        ),
    )


def _of_everyone(request: Request, span: Span, joining: int) -> Request:
    return replace(
        request,
        span=span,
        min_free_tokens=0,
        entry_rtt_ms=_padded(request.entry_rtt_ms, joining),
        entry_bytes_per_s=_padded(request.entry_bytes_per_s, joining),
        exit_bytes_per_s=_padded(request.exit_bytes_per_s, joining),
    )


def _with_ends(problem: Problem, snapshot: Snapshot, request: Request, first: Request) -> Problem:
    """`problem` with the links to and from the client of `request`."""
    asked = replace(request, exclude=first.exclude)
    ends = build_problem(replace(snapshot, links=None), asked)
    return replace(problem, entry_s_N=ends.entry_s_N, exit_s_N=ends.exit_s_N)


def _holding(node: NodeState, span: Span) -> NodeState:
    """The node with another span, at the same speed per block."""
    share = max(len(node.span), 1) / len(span)
    return replace(
        node,
        span=span,
        prefill_tokens_per_s=node.prefill_tokens_per_s * share,
        decode_tokens_per_s=node.decode_tokens_per_s * share,
    )


def _cut(span: Span, num_blocks: int) -> Span:
    return Span(min(span.start, num_blocks), min(span.end, num_blocks))


def _padded(values: PerNode, more: int) -> PerNode:
    if values is None or isinstance(values, Mapping):
        return values
    return np.concatenate([values, np.full(more, np.nan)])
