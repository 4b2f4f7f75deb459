"""Speeds of nodes that have measured none, by the roofline and by the measured nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from nesa_node.topology.roofline import PredictedSpeed
from nesa_node.topology.snapshot import NodeState

MAX_CORRECTION = 4.0
"""Most by which measured speeds change a prediction, either way."""


def predict_speeds(nodes: Sequence[NodeState]) -> tuple[NodeState, ...]:
    """`nodes`, those that have measured no speed with that of their roofline, where they have one.

    Predictions are corrected by the median ratio of measured to predicted speeds among `nodes`. A
    node without blocks gets the speed of a single one.
    """
    missing = [node for node in nodes if node.decode_tokens_per_s <= 0 and node.roofline]
    if not missing:
        return tuple(nodes)
    decode = _correction([(n.decode_tokens_per_s, s.decode_tokens_per_s) for n, s in _both(nodes)])
    prefill = _correction(
        [(n.prefill_tokens_per_s, s.prefill_tokens_per_s) for n, s in _both(nodes)]
    )
    predicted = {
        node.peer_id: replace(
            node,
            decode_tokens_per_s=decode * speed.decode_tokens_per_s,
            prefill_tokens_per_s=prefill * speed.prefill_tokens_per_s,
        )
        for node in missing
        if (speed := _predict(node)) is not None
    }
    return tuple(predicted.get(node.peer_id, node) for node in nodes)


def _both(nodes: Sequence[NodeState]) -> list[tuple[NodeState, PredictedSpeed]]:
    """Nodes with a measured speed and a predicted one."""
    pairs = ((node, _predict(node)) for node in nodes if node.decode_tokens_per_s > 0)
    return [(node, speed) for node, speed in pairs if speed is not None]


def _predict(node: NodeState) -> PredictedSpeed | None:
    return None if node.roofline is None else node.roofline.predict(max(len(node.span), 1))


def _correction(speeds: Sequence[tuple[float, float]]) -> float:
    ratios = [measured / predicted for measured, predicted in speeds if measured > 0]
    return min(max(median(ratios), 1 / MAX_CORRECTION), MAX_CORRECTION) if ratios else 1.0
