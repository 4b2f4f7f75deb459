"""Memory that a node promises to training: what fits decides what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from nesa_node.core.errors import BusyError, ProtocolError
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks, count_adapter_values
from nesa_node.engine.training.adapters import (
    BottleneckConfig,
    DeepPromptConfig,
    FullConfig,
    OptimizerConfig,
)
from nesa_node.engine.training.training_spec import TrainingSpec, make_spec
from nesa_node.engine.training.training_state import Partition, ZeroStage
from nesa_node.server.training.training_memory import TrainingMemory, TrainingNeed, compute_need
from tests.engine.chained import open_local
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS

pytestmark = PEFT_WARNINGS
ONE, TWO = PeerId("one"), PeerId("two")
NEED = TrainingNeed(
    adapter_bytes=10,
    running_bytes=10,
    kept_tokens=5,
    token_bytes={"input": 1, "inputs": 4, "activations": 12},
)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 7}),
        BottleneckConfig(5),
        DeepPromptConfig(3),
        FullConfig(),
    ],
    ids=["lora", "bottleneck", "deep_prompt", "full"],
)
def test_adapters_take_no_more_than_was_reserved(
    family: str, config: Any, tiny: Callable[[str], Path]
) -> None:
    checkpoint = open_local(tiny(family))
    blocks = load_blocks(checkpoint, Span(1, 3), dtype=torch.float32, device="cpu")
    spec = make_spec(config, OptimizerConfig(), 0, find_modules=list)
    made = AdaptedBlocks(blocks, checkpoint, spec.make_config(), seed=0)
    found = sum(value.numel() for value in made.parameters.values())
    assert 0 < found <= count_adapter_values(blocks, spec) <= 4 * found


@pytest.fixture
def blocks(tiny: Callable[[str], Path]) -> ModelBlocks:
    return load_blocks(open_local(tiny("llama")), Span(0, 2), dtype=torch.float32, device="cpu")


def test_momentum_and_tokens_take_memory(blocks: ModelBlocks) -> None:
    def need(optimizer: OptimizerConfig, tokens: int = 10) -> TrainingNeed:
        spec = TrainingSpec(optimizer=optimizer, seed=0, bottleneck=BottleneckConfig(4))
        return compute_need(
            blocks, spec, max_tokens=tokens, max_kept_tokens=2 * tokens, partition=Partition()
        )

    plain = need(OptimizerConfig("sgd"))
    # Values and gradients, moments, and a copy of values and moments on their way.
    assert need(OptimizerConfig("sgd", momentum=0.9)).adapter_bytes * 3 == plain.adapter_bytes * 5
    assert need(OptimizerConfig()).adapter_bytes * 3 == plain.adapter_bytes * 7
    assert need(OptimizerConfig(), 20).kept_tokens == 2 * plain.kept_tokens == 40
    assert plain.token_bytes["input"] == blocks.hidden_size * 4


def test_what_replicas_divide_takes_less(tiny: Callable[[str], Path]) -> None:
    """Four of them, of six blocks: bounds, since tensors are not divided."""
    whole = load_blocks(open_local(tiny("llama")), Span(0, 6), dtype=torch.float32, device="cpu")
    spec = TrainingSpec(optimizer=OptimizerConfig(), seed=0, full=FullConfig())

    def need(stage: ZeroStage) -> int:
        partition = Partition(stage, 0, 4)
        return compute_need(
            whole, spec, max_tokens=8, max_kept_tokens=8, partition=partition
        ).adapter_bytes

    numbers = count_adapter_values(whole, spec)
    # Values, gradients, moments, and a copy of values and moments on their way.
    assert need(0) == 4 * numbers * (1 + 1 + 2 + 3)
    share = 1 / 4 + 1 / 6
    assert need(1) == pytest.approx(4 * numbers * (2 + 2 * share + 1 + 2 * share), abs=1)
    assert need(2) == pytest.approx(4 * numbers * (1 + share + 2 * share + 1 + 2 * share), abs=1)
    held = share + 2 / 6
    assert need(3) == pytest.approx(4 * numbers * (2 * held + 5 * share), abs=1)


def test_a_session_gets_as_much_as_fits() -> None:
    # 20 for adapters and what runs; half of the promise is one peer's.
    for total, kept in ((200, 60), (160, 60), (158, 59), (80, 20), (78, 19), (50, 5)):
        memory = TrainingMemory(total)
        with memory.reserve(ONE, NEED) as room:
            assert (room.nbytes, room.tokens) == (kept, 5)
            assert memory.free_bytes == total - kept - 20
        assert memory.free_bytes == total


def test_one_peer_gets_a_half_and_a_full_node_is_busy() -> None:
    memory = TrainingMemory(100)
    with memory.reserve(ONE, NEED) as first:
        assert first.nbytes == 30
        with pytest.raises(BusyError, match="no room"), memory.reserve(ONE, NEED):
            pass
        with memory.reserve(TWO, NEED) as second:
            assert second.nbytes == 30
        assert memory.free_bytes == 50
    for total, code in ((0, "not_trained"), (49, "too_large")):
        with pytest.raises(ProtocolError) as refused, TrainingMemory(total).reserve(ONE, NEED):
            pass
        assert refused.value.code == code
