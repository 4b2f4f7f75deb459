"""Topology report of a swarm: the JSON document behind the topology page.

Names in it come from the network: they are text, never markup.

It has the swarm's shape (persistence barcodes, Betti curves, rings, the merge tree) and a stability
score of each node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nesa_node.topology.changes.triggers import HistoryEntry
from nesa_node.topology.shape.merge_tree import (
    Filtration,
    PersistenceDiagram,
    geographic_filtration,
    network_filtration,
    round_trip_filtration,
)
from nesa_node.topology.shape.network_shape import NetworkShape, compute_shape
from nesa_node.topology.shape.stability import ConnectionHeights, node_stability
from nesa_node.topology.snapshot import NodeState, Snapshot

MAX_BARS_PER_DIMENSION = 400
"""Maximum number of bars per dimension; the longest are kept."""
_BETTI_SCALES = 64
_MS_PER_S = 1e3


def shape_reports(snapshot: Snapshot) -> dict[str, Any]:
    """Shape reports by filtration; {} without nodes.

    "round_trips" (ms), which the triggers watch; "network" (ms of a step: half a round trip and the
    compute of both ends); "geography" (km), if at least two nodes declare a location.
    """
    if not snapshot.nodes:
        return {}
    everyone = list(range(len(snapshot.nodes)))
    trips = round_trip_filtration(snapshot)
    reports = {
        "round_trips": _filtration_report(trips, "ms", everyone),
        "network": _filtration_report(_compute_filtration(snapshot, trips), "ms", everyone),
    }
    placed = [row for row in everyone if snapshot.nodes[row].location is not None]
    if len(placed) >= 2:
        places_N2 = np.array([snapshot.nodes[row].location for row in placed], dtype=np.float64)
        ways = geographic_filtration(places_N2[:, 0], places_N2[:, 1])
        reports["geography"] = _filtration_report(ways, "km", placed)
    return reports


def _compute_filtration(snapshot: Snapshot, trips: Filtration) -> Filtration:
    """Step times in milliseconds; a node without a measured speed counts with no compute time."""
    rate_N = np.array([node.decode_tokens_per_s for node in snapshot.nodes])
    compute_ms_N = np.divide(_MS_PER_S, rate_N, out=np.zeros(len(rate_N)), where=rate_N > 0)
    return network_filtration(trips.weight_NN, compute_s_N=compute_ms_N)


def _filtration_report(filtration: Filtration, unit: str, row: list[int]) -> dict[str, Any]:
    """Report of one filtration; `row[i]` is the index of its node i among the snapshot's nodes."""
    shape = compute_shape(filtration)
    tree = shape.tree
    return {
        "unit": unit,
        "median_edge": shape.median_edge,
        "largest_edge": filtration.largest_weight(),
        "nodes": row,
        "h1_nodes": len(shape.landmarks.node_K),
        "ring_nodes": shape.loop_nodes,
        "h0": _diagram_json(shape.h0),
        "h1": _diagram_json(shape.h1),
        "betti": _betti_curves(shape, filtration.largest_weight()),
        "rings": [
            {
                "birth": loop.birth,
                "death": finite_or_none(loop.death),
                "edges": [[row[a], row[b]] for a, b in loop.edges],
            }
            for loop in shape.loops
        ],
        "leaves": [row[node] for node in tree.order_N.tolist()],
        "gaps": [finite_or_none(gap) for gap in tree.gap_N.tolist()],
    }


def _diagram_json(diagram: PersistenceDiagram) -> dict[str, Any]:
    """Bars [birth, death], the longest first; death is None for classes that never die."""
    bars = diagram.barcode(MAX_BARS_PER_DIMENSION)
    return {
        "bars": [[birth, finite_or_none(death)] for birth, death in bars],
        "left_out": len(diagram) - len(bars),
        "essential": diagram.num_essential,
    }


def _betti_curves(shape: NetworkShape, largest: float) -> dict[str, Any]:
    """Betti curves b0 and b1 from scale 0 to beyond the longest edge."""
    scales = np.linspace(0.0, 1.05 * largest, _BETTI_SCALES).tolist() if largest > 0 else [0.0]
    numbers = [shape.betti(scale) for scale in scales]
    at_unit = shape.betti(shape.median_edge)
    return {
        "scale": scales,
        "b0": [b0 for b0, _ in numbers],
        "b1": [b1 for _, b1 in numbers],
        "at_median_edge": list(at_unit),
    }


FORMAT = "nesa-node topology"
VERSION = 1
MAX_LINKS = 20_000


def topology_report(
    snapshot: Snapshot,
    *,
    looks: Sequence[HistoryEntry] = (),
    heights: Sequence[ConnectionHeights] = (),
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
            for seen in look.fired_triggers
        ],
        "active": dict(active) if active else None,
        "strategy": looks[-1].strategy if looks else None,
        "parameters": _value_history(looks, lambda look: look.parameters, lambda _: ""),
        "exponents": _value_history(
            looks, lambda look: look.exponents, lambda look: look.why_exponents
        ),
    }


def _nodes(snapshot: Snapshot, heights: Sequence[ConnectionHeights]) -> list[dict[str, Any]]:
    peers = [node.peer_id for node in snapshot.nodes]
    if not peers:
        return []
    scores = node_stability(heights, peers)
    return [_node(node, scores.get(node.peer_id)) for node in snapshot.nodes]


def _node(node: NodeState, stability: float | None) -> dict[str, Any]:
    """JSON object of one node; `stability` is None while there is no history."""
    return {
        "peer": node.peer_id,
        "name": node.public_name,
        "operator": node.operator,
        "private_schemes": node.private_schemes,
        "span": [node.span.start, node.span.end],
        "max_blocks": node.max_blocks,
        "decode_tokens_per_s": node.decode_tokens_per_s,
        "prefill_tokens_per_s": node.prefill_tokens_per_s,
        "quantization": node.quantization,
        "cache_dtype": node.cache_dtype,
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
    links = snapshot.links.select([node.peer_id for node in snapshot.nodes])
    shortest = links.shortest_pairs(MAX_LINKS)
    return {
        "pairs": [
            {
                "nodes": [a, b],
                "rtt_ms": float(links.rtt_ms_NN[a, b]),
                "age_s": finite_or_none(links.age_s_NN[a, b]),
                "confidence": float(links.confidence_NN[a, b]),
                "bytes_per_s": [
                    finite_or_none(links.rate_bytes_per_s_NN[a, b]),
                    finite_or_none(links.rate_bytes_per_s_NN[b, a]),
                ],
            }
            for a, b in shortest.rows
        ],
        "left_out": shortest.num_left_out,
        "median_rtt_ms": shortest.median_rtt_ms,
    }


def _history(looks: Sequence[HistoryEntry]) -> dict[str, Any]:
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


def _value_history(
    looks: Sequence[HistoryEntry],
    values: Callable[[HistoryEntry], Mapping[str, float]],
    why: Callable[[HistoryEntry], str],
) -> dict[str, Any]:
    """The present values, and each change of them with its time and reason."""
    found: list[dict[str, Any]] = []
    for look in looks:
        now = dict(values(look))
        if now and (not found or found[-1]["values"] != now):
            found.append({"at": look.at, "values": now, "why": why(look)})
    return {"now": found[-1]["values"] if found else {}, "history": found}


def finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
