"""What a node held before a move does not stay with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from nesa_node.core.ids import Span
from tests.client.local_models import random_ids
from tests.faults.bed import Bed, open_bed
from tests.faults.movers import mover_config, open_moving_process
from tests.faults.nursery import Nursery
from tests.faults.runs import generate, join_bed

LOW, HIGH, LONG = Span(0, 4), Span(4, 8), Span(2, 8)
MOVES = 10
MIB = 1 << 20
GROWTH_BYTES = 12 * MIB
"""From the second move to the last. Each loads 52 MiB of weights and writes 8 MiB of cache."""


@pytest.fixture
def bed(nursery: Nursery, tmp_path: Path) -> Iterator[Bed]:
    """Of a model of 8 blocks with 13 MiB each."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1600,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    with open_bed(nursery, tmp_path / "model", tmp_path) as bed:
        yield bed


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("quant_type", ["none", "int8"])
def test_memory_is_flat_over_moves(bed: Bed, tmp_path: Path, quant_type: str) -> None:
    bed.start([HIGH])
    config = mover_config(bed, LOW, tmp_path, quant_type=quant_type, move_pause_s=1)
    held: list[int] = []
    with (
        open_moving_process(config, tmp_path / "mover.log") as moving,
        join_bed(bed, "chain") as model,
    ):
        for number in range(MOVES):
            if number == 1:
                bed.start([LOW])
            with model.inference_session(512) as session:
                # Its pages are written, and given up with the node.
                generate(model, random_ids(1, 400), session, new_tokens=2)
                if number == 0:
                    bed.start([LOW])
                moving.tell((HIGH, LOW)[number % 2])
                generate(model, random_ids(1, 2), session, new_tokens=8)
            answer, uss = moving.answer()
            assert answer == "moved"
            held.append(uss)
        print([f"{uss / MIB:.0f} MiB" for uss in held])
        assert max(held[2:]) - held[1] <= GROWTH_BYTES
        # The same with other blocks would be seen: half as many again take half as much again.
        moving.tell(LONG)
        answer, uss = moving.answer()
        assert answer == "moved"
        if quant_type == "none":
            assert uss - held[-1] > 20 * MIB
