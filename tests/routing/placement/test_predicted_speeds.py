"""Placements of nodes that have measured no speed, judged by their true speeds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.placement_problem import make_placement_problem
from nesa_node.routing.placement.plan import find_assignment
from nesa_node.routing.placement.score import score_assignment
from nesa_node.topology.roofline import BlockWork, Roofline, WeightFigures
from nesa_node.topology.snapshot import NodeState, Snapshot

BLOCKS = 24


def _make_node(name: str, rng: np.random.Generator) -> NodeState:
    """A GPU that reads 50 GB/s to 2 TB/s, and reaches 0.5 to 0.9 of what its figures say."""
    figures = WeightFigures(
        5e-5, 10 ** rng.uniform(10.7, 12.3), 10 ** rng.uniform(12.5, 14.5), True
    )
    roofline = Roofline(figures, BlockWork(4e8, 4e8))
    start = int(rng.integers(0, 13))
    span = Span(start, start + int(rng.integers(6, 12)))
    speed, reached = roofline.predict(len(span)), rng.uniform(0.5, 0.9)
    return NodeState(
        PeerId(name),
        span,
        decode_tokens_per_s=reached * speed.decode_tokens_per_s,
        prefill_tokens_per_s=reached * speed.prefill_tokens_per_s,
        max_blocks=int(rng.integers(6, 13)),
        roofline=roofline,
    )


def test_plans_with_figures_are_near_those_with_true_speeds() -> None:
    """Eight measured nodes and four new ones: throughput over that of a plan by true speeds."""
    rng = np.random.default_rng(0)
    request = ChainRequest(span=Span(0, BLOCKS), default_rtt_ms=20.0)
    reached: dict[bool, list[float]] = {True: [], False: []}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(12):
        old, new = (
            tuple(_make_node(f"{kind}{number}", rng) for number in range(count))
            for kind, count in (("a", 8), ("b", 4))
        )
        true = Snapshot(ModelId("m@0"), BLOCKS, old, 0.0, joining=new)
        truth = make_placement_problem(true, request)
        assignment, _, _ = find_assignment(truth, "throughput")
        best = score_assignment(truth, assignment).steps_per_s
        for known in (True, False):
            hidden = tuple(
                replace(
                    node,
                    decode_tokens_per_s=0.0,
                    prefill_tokens_per_s=0.0,
                    roofline=node.roofline if known else None,
                )
                for node in new
            )
            instance = make_placement_problem(replace(true, joining=hidden), request)
            ratio_N = instance.problem.block_s_N[8:] / truth.problem.block_s_N[8:]
            errors[known] += np.abs(np.log(ratio_N)).tolist()
            found, _, _ = find_assignment(instance, "throughput")
            reached[known].append(score_assignment(truth, found).steps_per_s / best)
    assert np.mean(reached[True]) > 0.96
    assert np.mean(reached[True]) > np.mean(reached[False]) + 0.05
    assert np.exp(np.mean(errors[True])) < 1.3
    assert np.exp(np.mean(errors[False])) > 3.0


def test_prefill_is_planned_by_figures_too() -> None:
    node = _make_node("a", np.random.default_rng(1))
    hidden = replace(node, decode_tokens_per_s=0.0, prefill_tokens_per_s=0.0)
    snapshot = Snapshot(ModelId("m@0"), BLOCKS, (hidden,), 0.0)
    asked = ChainRequest(span=Span(0, BLOCKS), tokens=128)
    block_s = make_placement_problem(snapshot, asked).problem.block_s_N[0]
    roofline = node.roofline
    assert roofline is not None
    assert block_s == pytest.approx(roofline.figures.block_s(roofline.work, 128))
