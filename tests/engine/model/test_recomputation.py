"""Blocks computed again a few at a time, as weights fit into little memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nesa_node.core.ids import Span
from nesa_node.engine.model import recomputation
from nesa_node.engine.model.recomputation import run_blocks, split_runs
from nesa_node.engine.weights.checkpoint import open_folder
from tests.engine.tiny_models import BLOCKS, HIDDEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_together_give_what_they_give_one_by_one(
    dtype: torch.dtype, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_folder(tiny("llama"))
    span = Span(1, BLOCKS)
    inputs = [torch.randn(length, HIDDEN).to(dtype) for length in (20, 1)]
    assert split_runs(checkpoint, span, dtype) == [span]
    together = [
        each for each, _ in run_blocks(checkpoint, span, inputs, dtype=dtype, quant_type="none")
    ]
    monkeypatch.setattr(recomputation, "MAX_RUN_BYTES", 1)
    singles = split_runs(checkpoint, span, dtype)
    assert singles == [Span(block, block + 1) for block in range(1, BLOCKS)]
    rows = inputs
    for single in singles:
        ran = run_blocks(checkpoint, single, rows, dtype=dtype, quant_type="none")
        rows = [each for each, _ in ran]
    assert all(map(torch.equal, together, rows))


def test_parts_of_a_span(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_folder(tiny("llama"))
    total = sum(tensor.numel for tensor in checkpoint.tensors.values()) * 4
    monkeypatch.setattr(recomputation, "MAX_RUN_BYTES", 2 * total // BLOCKS)
    found = split_runs(checkpoint, Span(0, 5), torch.float32)
    assert found == [Span(0, 2), Span(2, 4), Span(4, 5)]
    assert split_runs(checkpoint, Span(0, 5), torch.bfloat16) == [Span(0, 4), Span(4, 5)]
    assert split_runs(checkpoint, Span(3, 3), torch.float32) == []


def test_blocks_of_experts_are_apart(tiny: Callable[[str], Path]) -> None:
    checkpoint = open_folder(tiny("mixtral"))
    found = split_runs(checkpoint, Span(0, 2), torch.float32)
    assert found == [Span(0, 1), Span(1, 2)], "so that each one's routers are known"
