"""Nodes that lie, and bounds for the small models of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.recovery.suspicion import SlowdownDetector
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.model.blocks import ModelBlocks, TokenSlice
from nesa_node.engine.model.devices import SpanThroughput, measure_throughput
from nesa_node.routing.reputation import SpeedClaims
from nesa_node.server.node import served_span, span_speed
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.verification import comparison
from nesa_node.verification.comparison import ComputationKind, Threshold
from tests.engine.tiny_models import BLOCKS


def calibrate_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"none": 1e-4, "int8": 0.02, "blockwise8": 0.04}
    fitted = {
        ComputationKind("llama", "float32", "none", "cpu", codec): {
            BLOCKS: Threshold(bound, bound, bound, 1)
        }
        for codec, bound in bounds.items()
    }
    monkeypatch.setattr(comparison, "_load_thresholds", lambda _: fitted)


def lie(
    monkeypatch: pytest.MonkeyPatch,
    at: Span,
    change: Callable[[torch.Tensor], None],
    *,
    in_parts: bool = False,
    nodes: int = 1,
) -> None:
    """Have the first `nodes` nodes of the blocks `at` change their outputs [T, D].

    With `in_parts` also those of parts of the blocks.
    """
    load, select = served_span._load, ModelBlocks.select
    liars = iter(range(nodes))

    def make_lying(blocks: ModelBlocks) -> ModelBlocks:
        run = blocks.forward_buffers

        def forward_buffers(pieces: list[TokenSlice], runs: Any) -> None:
            run(pieces, runs)
            with torch.inference_mode():
                for piece in pieces:
                    assert piece.buffers.output is not None
                    change(piece.buffers.output.tensor_TD[piece.start : piece.end])

        monkeypatch.setattr(blocks, "forward_buffers", forward_buffers)
        monkeypatch.setattr(blocks, "lies", True, raising=False)
        if in_parts:
            parts: dict[Span, ModelBlocks] = {blocks.span: blocks}

            def select_lying(span: Span) -> ModelBlocks:
                if span not in parts:
                    parts[span] = make_lying(select(blocks, span))
                return parts[span]

            monkeypatch.setattr(blocks, "select", select_lying)
        return blocks

    def load_liar(*args: Any) -> ModelBlocks:
        blocks = load(*args)
        if blocks.span == at and next(liars, None) is not None:
            return make_lying(blocks)
        return blocks

    monkeypatch.setattr(served_span, "_load", load_liar)


def scale(output_TD: torch.Tensor) -> None:
    output_TD.mul_(1.05)


def peer_of(path: Path) -> PeerId:
    """Of the identity file `path`."""
    return Identity.load_or_create(path).peer_id


def boast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nodes that lie say that they are fast, honest ones that they are slow, and clients
    believe it: else round trips decide.
    """

    def measure(blocks: ModelBlocks) -> SpanThroughput:
        found = measure_throughput(blocks)
        factor = 50.0 if getattr(blocks, "lies", False) else 0.02
        return replace(found, decode_tokens_per_s=factor * found.decode_tokens_per_s)

    monkeypatch.setattr(served_span, "measure_throughput", measure)
    monkeypatch.setattr(span_speed, "SAMPLE_INTERVAL_S", 1e6)
    monkeypatch.setattr(SpeedClaims, "record_measurement", lambda *_: None)
    monkeypatch.setattr(SlowdownDetector, "should_reconsider", lambda _: False)


def session_over(model: DistributedModelForCausalLM, peer: PeerId) -> InferenceSession:
    """A session that uses a node, which is one of those drawn by chance."""
    while True:
        session = model.inference_session(max_length=60)
        if peer in {hop.peer_id for hop in session.hops}:
            return session
        session.close()
