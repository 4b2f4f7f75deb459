"""Topology report of a swarm: the JSON document behind the topology page.

Names in it come from the network: they are text, never markup.

It has the swarm's shape (persistence barcodes, Betti curves, rings, the merge tree) and a stability
score of each node, from the variation of its cophenetic height.

A node's height is the scale at which it is connected with a share of the swarm; it varies when the
node's links do. Section 3.1 of the paper raises R for nodes in long-lived features but prints no
formula; this one is ours, and `benchmarks stability` compares it with later failures. A share of a
tenth predicts better than a half, which depends on links between regions. A node's round trips at
the same quantile predict as well or better where measured, and often uptime alone does: both
functions accept either, and routing should not weigh by heights without a measurement.

Legend: T past snapshots, N nodes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.ids import PeerId
from nesa_node.topology.changes.triggers import HistoryEntry
from nesa_node.topology.shape.merge_tree import (
    Filtration,
    PersistenceDiagram,
    geographic_filtration,
    merge_tree,
    network_filtration,
    quantile_heights,
    round_trip_filtration,
)
from nesa_node.topology.shape.network_shape import NetworkShape, compute_shape
from nesa_node.topology.snapshot import NodeState, Snapshot

# Deviation at which the score is a half.
DEVIATION_TOLERANCE = 0.5
NEIGHBOURHOOD_QUANTILE = 0.1
MIN_HEIGHTS = 5


def height_deviation(height_TN: Floats) -> Floats:
    """Mean distance of a node's heights from their median, relative to it, [N] float64.

    The median change of all nodes in a snapshot is divided out first. It is the mean distance, not
    the median: failures are rare, and a robust measure would miss them.

    height_TN : [T, N] float64, `quantile_heights(tree, NEIGHBOURHOOD_QUANTILE, cap=...)` of past
    snapshots in any
        order, or nodes' round trips at that quantile; NaN where a node was absent. Not modified.

    NaN for nodes with fewer than 5 heights.
    """
    height_TN = np.asarray(height_TN, dtype=np.float64)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # columns or rows that are all NaN
        median_N = np.nanmedian(height_TN, axis=0)
        ratio_TN = np.where(median_N > 0, height_TN / median_N, height_TN * 0 + 1)
        common_T = np.nanmedian(ratio_TN, axis=1)
        ratio_TN /= np.where(common_T > 0, common_T, 1.0)[:, None]
        relative_N: Floats = np.nanmean(np.abs(ratio_TN - 1), axis=0)
    relative_N[np.isfinite(height_TN).sum(axis=0) < MIN_HEIGHTS] = np.nan
    return relative_N


def stability_scores(height_TN: Floats, *, tolerance: float = DEVIATION_TOLERANCE) -> Floats:
    """Factors of reliability in (0, 1], [N] float64: 1 / (1 + deviation / `tolerance`).

    Nodes with too few heights get the median score of the other nodes, or 1.
    """
    if tolerance <= 0:
        raise ValueError(f"the tolerance must be positive, not {tolerance}")
    score_N: Floats = 1.0 / (1.0 + height_deviation(height_TN) / tolerance)
    known_N = np.isfinite(score_N)
    score_N[~known_N] = np.median(score_N[known_N]) if known_N.any() else 1.0
    return score_N


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
_UNREACHABLE_FACTOR = 10.0
"""Height of a node without any link, in median round trips."""

ConnectionHeights = Mapping[PeerId, float]


def connection_heights(snapshot: Snapshot) -> dict[PeerId, float]:
    """Round trip in ms at which each serving node is connected with a tenth of the other nodes."""
    if not snapshot.nodes:
        return {}
    filtration = round_trip_filtration(snapshot)
    cap = _UNREACHABLE_FACTOR * filtration.median_weight()
    height_N = quantile_heights(merge_tree(filtration), NEIGHBOURHOOD_QUANTILE, cap=cap)
    peers = (node.peer_id for node in snapshot.nodes)
    return dict(zip(peers, height_N.tolist(), strict=True))


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
