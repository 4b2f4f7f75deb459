"""Topology report of a swarm: the JSON document behind the topology page.

Names in it come from the network: they are text, never markup.

Legend: N nodes, T past snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.topology.homology.cophenetic import quantile_heights
from nesa_node.topology.homology.merge_tree import merge_tree
from nesa_node.topology.homology.stability import NEAR, stability_scores
from nesa_node.topology.homology.weights import round_trip_filtration
from nesa_node.topology.looks import Look
from nesa_node.topology.shape_report import shape_reports
from nesa_node.topology.snapshot import NodeState, Snapshot

FORMAT = "nesa-node topology"
VERSION = 1
MAX_LINKS = 20_000
_CAP = 10.0
"""Height of a node without any link, in median round trips."""

Heights = Mapping[PeerId, float]


def heights_of(snapshot: Snapshot) -> dict[PeerId, float]:
    """Round trip in ms at which each serving node is connected with a tenth of the other nodes."""
    if not snapshot.nodes:
        return {}
    filtration = round_trip_filtration(snapshot)
    cap = _CAP * filtration.median_weight()
    height_N = quantile_heights(merge_tree(filtration), NEAR, cap=cap)
    peers = (node.peer_id for node in snapshot.nodes)
    return dict(zip(peers, height_N.tolist(), strict=True))


def topology_report(
    snapshot: Snapshot,
    *,
    looks: Sequence[Look] = (),
    heights: Sequence[Heights] = (),
    active: Mapping[str, Any] | None = None,
    leads: bool = False,
) -> dict[str, Any]:
    """JSON document of a snapshot and its history.

    `looks` and `heights` are those of past snapshots, the oldest first; `active` is the placement
    in force, as JSON. NaN and infinity become None.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": snapshot.model_id,
        "num_blocks": snapshot.num_blocks,
        "taken_at": snapshot.taken_at,
        "digest": snapshot.digest(),
        "leads": leads,
        "nodes": _nodes(snapshot, heights),
        "joining": [_node(node, None) for node in snapshot.joining],
        "coverage": list(snapshot.coverage()),
        "links": _links(snapshot),
        "shapes": shape_reports(snapshot),
        "history": _history(looks),
        "events": [
            {"at": look.at, "trigger": seen.name, "figure": seen.figure}
            | {"threshold": seen.threshold, "reason": seen.reason}
            for look in looks
            for seen in look.fired
        ],
        "active": dict(active) if active else None,
        "strategy": looks[-1].strategy if looks else None,
        "parameters": _changes(looks, lambda look: look.parameters, lambda _: ""),
        "exponents": _changes(looks, lambda look: look.exponents, lambda look: look.why_exponents),
    }


def _nodes(snapshot: Snapshot, heights: Sequence[Heights]) -> list[dict[str, Any]]:
    peers = [node.peer_id for node in snapshot.nodes]
    if not peers:
        return []
    height_TN = np.array([[past.get(peer, np.nan) for peer in peers] for past in heights])
    score_N = stability_scores(height_TN.reshape(len(heights), len(peers))) if heights else None
    scores = score_N.tolist() if score_N is not None else [None] * len(peers)
    return [_node(node, score) for node, score in zip(snapshot.nodes, scores, strict=True)]


def _node(node: NodeState, stability: float | None) -> dict[str, Any]:
    """JSON object of one node; `stability` is None while there is no history."""
    return {
        "peer": node.peer_id,
        "name": node.public_name,
        "span": [node.span.start, node.span.end],
        "max_blocks": node.max_blocks,
        "decode_tokens_per_s": node.decode_tokens_per_s,
        "prefill_tokens_per_s": node.prefill_tokens_per_s,
        "quantization": node.quantization,
        "dtype": node.dtype,
        "load": node.load,
        "free_cache_tokens": node.free_cache_tokens,
        "total_cache_tokens": node.total_cache_tokens,
        "uptime_s": node.uptime_s,
        "reliability": node.reliability,
        "stability": stability,
        "movable": node.movable,
        "location": list(node.location) if node.location else None,
    }


def _links(snapshot: Snapshot) -> dict[str, Any]:
    """Known links as pairs of node indices, the shortest first, at most `MAX_LINKS`."""
    if snapshot.links is None:
        return {"pairs": [], "left_out": 0, "median_rtt_ms": None}
    links = snapshot.links.of([node.peer_id for node in snapshot.nodes])
    first, second = np.triu_indices(len(links.peers), 1)
    rtt_ms = links.rtt_ms_NN[first, second]
    known = np.flatnonzero(np.isfinite(rtt_ms))
    chosen = known[np.argsort(rtt_ms[known], kind="stable")][:MAX_LINKS]
    return {
        "pairs": [
            {
                "nodes": [a, b],
                "rtt_ms": float(links.rtt_ms_NN[a, b]),
                "age_s": finite(links.age_s_NN[a, b]),
                "confidence": float(links.confidence_NN[a, b]),
                "bytes_per_s": [
                    finite(links.rate_bytes_per_s_NN[a, b]),
                    finite(links.rate_bytes_per_s_NN[b, a]),
                ],
            }
            for a, b in zip(first[chosen].tolist(), second[chosen].tolist(), strict=True)
        ],
        "left_out": len(known) - len(chosen),
        "median_rtt_ms": float(np.median(rtt_ms[known])) if len(known) else None,
    }


def _history(looks: Sequence[Look]) -> dict[str, Any]:
    """History as columns for charts; None where a trigger was not evaluated."""
    names = list(dict.fromkeys(seen.name for look in looks for seen in look.seen))
    rows = [{seen.name: seen for seen in look.seen} for look in looks]
    return {
        "at": [look.at for look in looks],
        "nodes": [look.nodes for look in looks],
        "latency_s": [look.latency_s for look in looks],
        "steps_per_s": [look.steps_per_s for look in looks],
        "placement": [look.placement for look in looks],
        "triggers": {
            name: {
                "figure": [row[name].figure if name in row else None for row in rows],
                "threshold": [row[name].threshold if name in row else None for row in rows],
                "fired": [name in row and row[name].fired for row in rows],
            }
            for name in names
        },
    }


def _changes(
    looks: Sequence[Look],
    values: Callable[[Look], Mapping[str, float]],
    why: Callable[[Look], str],
) -> dict[str, Any]:
    """The present values, and each change of them with its time and reason."""
    found: list[dict[str, Any]] = []
    for look in looks:
        now = dict(values(look))
        if now and (not found or found[-1]["values"] != now):
            found.append({"at": look.at, "values": now, "why": why(look)})
    return {"now": found[-1]["values"] if found else {}, "history": found}


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
