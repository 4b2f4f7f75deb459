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
from nesa_node.engine.training.adapters import BottleneckConfig, DeepPromptConfig, OptimizerConfig
from nesa_node.engine.training.training_spec import TrainingSpec, make_spec
from nesa_node.server.training.training_memory import TrainingMemory, TrainingNeed, compute_need
from tests.engine.chained import open_local
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS

pytestmark = PEFT_WARNINGS
ONE, TWO = PeerId("one"), PeerId("two")
NEED = TrainingNeed(
    adapter_bytes=10,
    running_bytes=10,
    kept_bytes={"activations": 60, "inputs": 20, "input": 5},
)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 7}),
        BottleneckConfig(5),
        DeepPromptConfig(3),
    ],
    ids=["lora", "bottleneck", "deep_prompt"],
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
        return compute_need(blocks, spec, max_tokens=tokens, max_kept_tokens=2 * tokens)

    plain = need(OptimizerConfig("sgd"))
    # Values and gradients, moments, and a copy of values and moments on their way.
    assert need(OptimizerConfig("sgd", momentum=0.9)).adapter_bytes * 3 == plain.adapter_bytes * 5
    assert need(OptimizerConfig()).adapter_bytes * 3 == plain.adapter_bytes * 7
    assert need(OptimizerConfig(), 20).kept_bytes["inputs"] == 2 * plain.kept_bytes["inputs"]
    assert plain.kept_bytes["input"] == 20 * blocks.hidden_size * 4


def test_a_session_keeps_as_much_as_fits() -> None:
    for total, keep in ((160, "activations"), (158, "inputs"), (80, "inputs"), (78, "input")):
        memory = TrainingMemory(total)
        with memory.reserve(ONE, NEED) as kept:
            assert kept == keep
        assert memory.free_bytes == total


def test_one_peer_gets_a_half_and_a_full_node_is_busy() -> None:
    memory = TrainingMemory(100)
    with memory.reserve(ONE, NEED) as first:
        assert first == "inputs"
        with pytest.raises(BusyError, match="no room"), memory.reserve(ONE, NEED):
            pass
        with memory.reserve(TWO, NEED) as second:
            assert second == "inputs"
        assert memory.free_bytes == 60
    for total, code in ((0, "not_trained"), (49, "too_large")):
        with pytest.raises(ProtocolError) as refused, TrainingMemory(total).reserve(ONE, NEED):
            pass
        assert refused.value.code == code
