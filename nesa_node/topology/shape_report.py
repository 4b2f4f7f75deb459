"""Shape of a swarm as JSON: persistence barcodes, Betti curves, rings, and the merge tree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nesa_node.topology.homology.diagrams import Diagram
from nesa_node.topology.homology.filtration import Filtration
from nesa_node.topology.homology.shape import Shape, shape_of
from nesa_node.topology.homology.weights import (
    geographic_filtration,
    network_filtration,
    round_trip_filtration,
)
from nesa_node.topology.snapshot import Snapshot

MAX_BARS = 400
"""Maximum number of bars per dimension; the longest are kept."""
_SCALES = 64
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
        "round_trips": _report(trips, "ms", everyone),
        "network": _report(_network(snapshot, trips), "ms", everyone),
    }
    placed = [row for row in everyone if snapshot.nodes[row].location is not None]
    if len(placed) >= 2:
        places_N2 = np.array([snapshot.nodes[row].location for row in placed], dtype=np.float64)
        ways = geographic_filtration(places_N2[:, 0], places_N2[:, 1])
        reports["geography"] = _report(ways, "km", placed)
    return reports


def _network(snapshot: Snapshot, trips: Filtration) -> Filtration:
    """Step times in milliseconds; a node without a measured speed counts with no compute time."""
    rate_N = np.array([node.decode_tokens_per_s for node in snapshot.nodes])
    compute_ms_N = np.divide(_MS_PER_S, rate_N, out=np.zeros(len(rate_N)), where=rate_N > 0)
    return network_filtration(trips.weight_NN, compute_s_N=compute_ms_N)


def _report(filtration: Filtration, unit: str, row: list[int]) -> dict[str, Any]:
    """Report of one filtration; `row[i]` is the index of its node i among the snapshot's nodes."""
    shape = shape_of(filtration)
    tree = shape.tree
    return {
        "unit": unit,
        "median_edge": shape.unit,
        "largest_edge": filtration.largest_weight(),
        "nodes": row,
        "h1_nodes": len(shape.landmarks.node_K),
        "ring_nodes": shape.loop_nodes,
        "h0": _diagram(shape.h0),
        "h1": _diagram(shape.h1),
        "betti": _betti(shape, filtration.largest_weight()),
        "rings": [
            {
                "birth": loop.birth,
                "death": _finite(loop.death),
                "edges": [[row[a], row[b]] for a, b in loop.edges],
            }
            for loop in shape.loops
        ],
        "leaves": [row[node] for node in tree.order_N.tolist()],
        "gaps": [_finite(gap) for gap in tree.gap_N.tolist()],
    }


def _diagram(diagram: Diagram) -> dict[str, Any]:
    """Bars [birth, death], the longest first; death is None for classes that never die."""
    bars = diagram.barcode(MAX_BARS)
    return {
        "bars": [[birth, _finite(death)] for birth, death in bars],
        "left_out": len(diagram) - len(bars),
        "essential": diagram.essential,
    }


def _betti(shape: Shape, largest: float) -> dict[str, Any]:
    """Betti curves b0 and b1 from scale 0 to beyond the longest edge."""
    scales = np.linspace(0.0, 1.05 * largest, _SCALES).tolist() if largest > 0 else [0.0]
    numbers = [shape.betti(scale) for scale in scales]
    at_unit = shape.betti(shape.unit)
    return {
        "scale": scales,
        "b0": [b0 for b0, _ in numbers],
        "b1": [b1 for _, b1 in numbers],
        "at_median_edge": list(at_unit),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
