"""Explanation of a chosen chain, for `nesa-node explain`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nesa_node.core.span import Span
from nesa_node.routing.build import Request
from nesa_node.routing.chains import Hop, problem_of, visits_of
from nesa_node.routing.problem import Chain, Problem
from nesa_node.routing.strategies import Alternative, Strategy, explain
from nesa_node.topology.snapshot import Snapshot


def describe(
    snapshot: Snapshot, request: Request, hops: Sequence[Hop], strategy: Strategy, reason: str
) -> dict[str, Any]:
    """Describe as JSON the terms of the chain's cost, and the cost without each of its nodes.

    An infinite cost becomes None. `hops` cover the request's span. Takes one planning run for each
    hop.
    """
    used = frozenset(hop.peer_id for hop in hops)
    problem = problem_of(
        snapshot, replace(request, exclude=request.exclude - used, min_free_tokens=0)
    )
    explanation = explain(problem, visits_of(problem, request.span, hops), strategy)
    return {
        "reason": reason,
        "model": snapshot.model_id,
        "strategy": explanation.strategy,
        "nodes": problem.num_nodes,
        "excluded": len(request.exclude),
        "chain": _chain(problem, explanation.chain, request.span),
        "terms": dict(explanation.terms),
        "cost": explanation.cost,
        "step_s": dict(explanation.step_s),
        "alternatives": [
            _alternative(problem, alternative, request.span)
            for alternative in explanation.alternatives
        ],
    }


def _chain(problem: Problem, chain: Chain, span: Span) -> list[dict[str, Any]]:
    """Visits of a chain with their seconds: transfer to the node, and computation there."""
    visits: list[dict[str, Any]] = []
    for at, visit in enumerate(chain):
        way_s = (
            problem.transfer_s_NN[chain[at - 1].node, visit.node]
            if at
            else problem.entry_s_N[visit.node]
        )
        visits.append(
            {
                "peer": problem.peers[visit.node],
                "blocks": [span.start + visit.start, span.start + visit.end],
                "way_s": float(way_s),
                "visit_s": float(problem.visit_s_N[visit.node]),
                "compute_s": float(problem.busy_block_s_N[visit.node] * (visit.end - visit.start)),
                "load": float(problem.load_N[visit.node]),
            }
        )
    return visits


def _alternative(problem: Problem, alternative: Alternative, span: Span) -> dict[str, Any]:
    found = alternative.chain is not None and math.isfinite(alternative.cost)
    return {
        "without": alternative.without,
        "cost": alternative.cost if found else None,
        "step_s": alternative.step_s if found else None,
        "chain": _chain(problem, alternative.chain, span) if alternative.chain else None,
    }
