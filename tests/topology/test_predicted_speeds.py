"""Speeds of nodes that have measured none."""

from __future__ import annotations

import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.predicted_speeds import predict_speeds
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures
from nesa_node.topology.snapshot import NodeState

# One block takes 10 ms of decoding, and 20 ms of a chunk of 128 tokens.
ROOFLINE = Roofline(WeightFigures(0.0, 1e9, 128 * 5e8), BlockWork(1e7, 1e7))


def _node(name: str, blocks: int, decode: float, prefill: float, known: bool = True) -> NodeState:
    return NodeState(
        PeerId(name),
        Span(0, blocks),
        decode_tokens_per_s=decode,
        prefill_tokens_per_s=prefill,
        roofline=ROOFLINE if known else None,
    )


def test_a_node_without_a_measured_speed_gets_that_of_its_roofline() -> None:
    new, empty = _node("new", 4, 0.0, 0.0), _node("empty", 0, 0.0, 0.0)
    got = predict_speeds([new, empty])
    assert [each.decode_tokens_per_s for each in got] == pytest.approx([25.0, 100.0])
    assert [each.prefill_tokens_per_s for each in got] == pytest.approx([1600.0, 6400.0])


def test_predictions_are_corrected_by_what_others_measured() -> None:
    """By the median of 0.5, 0.6 and 0.9; of prefill of 0.25 alone, since the rest measured none."""
    measured = [
        _node("a", 2, 0.5 * 50.0, 0.25 * 3200.0),
        _node("b", 5, 0.6 * 20.0, 0.0),
        _node("c", 1, 0.9 * 100.0, 0.0),
        _node("d", 1, 1000.0, 1.0, known=False),
    ]
    *kept, got = predict_speeds([*measured, _node("new", 4, 0.0, 0.0)])
    assert kept == measured
    assert got.decode_tokens_per_s == pytest.approx(0.6 * 25.0)
    assert got.prefill_tokens_per_s == pytest.approx(0.25 * 1600.0)


@pytest.mark.parametrize(("measured", "factor"), [(1e6, 4.0), (1e-6, 0.25)])
def test_one_false_speed_changes_a_prediction_fourfold_at_most(
    measured: float, factor: float
) -> None:
    liar, new = _node("a", 1, measured, 1.0), _node("new", 4, 0.0, 0.0)
    assert predict_speeds([liar, new])[1].decode_tokens_per_s == pytest.approx(factor * 25.0)


def test_a_node_without_figures_stays_unmeasured() -> None:
    silent = _node("silent", 4, 0.0, 0.0, known=False)
    assert predict_speeds([silent, _node("new", 1, 0.0, 0.0)])[0] == silent
