"""A client and its spans in this process, which train on numbers that grow by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks, MicroBatch
from nesa_node.engine.training.adapters import OptimizerConfig
from nesa_node.engine.training.kept_micro_batches import Keep, KeptRoom
from nesa_node.engine.training.span_trainer import (
    BlockByBlock,
    SpanTrainer,
    compute_clip_scale,
    finish,
)
from nesa_node.engine.training.training_state import Partition, block_of
from tests.engine.chained import Chain, open_local
from tests.engine.training.test_adapted_blocks import SEED

CONFIG: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
MAX_NORM = 0.5
STEPS = 50
RATES = {"adamw": 2e-3, "sgd": 0.5}


def learning_rate(step: int, optimizer: str) -> float:
    return RATES[optimizer] * min((step + 1) / 10, 1.0)


def data_of(step: int, micro: int) -> Tensor:
    """Numbers that grow by one."""
    first_R1 = torch.tensor([[(37 * step + 11 * micro) % 200], [(53 * step + 17 * micro) % 200]])
    return 3 + first_R1 + torch.arange(12)


def loss_of(logits_RLV: Tensor, ids_RL: Tensor) -> Tensor:
    predicted = logits_RLV[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(predicted, ids_RL[:, 1:].flatten())


class Session:
    """A client and its spans in this process."""

    def __init__(
        self,
        folder: Path,
        optimizer: str = "adamw",
        keep: Keep | KeptRoom = "inputs",
        *,
        adapter: Any = CONFIG,
        partition: Partition | None = None,
    ) -> None:
        self.chain, self.optimizer = Chain(folder), optimizer
        extra: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
        config = OptimizerConfig(optimizer, weight_decay=0.01, **extra)  # type: ignore[arg-type]
        checkpoint = open_local(folder)
        adapted = [
            AdaptedBlocks(span, checkpoint, adapter, seed=SEED, partition=partition)
            for span in self.chain.blocks
        ]
        self.spans = [SpanTrainer(each, config, keep=keep, partition=partition) for each in adapted]
        self.lenders: list[Session] = []
        """Other replicas, where parameters are divided."""
        self.handed_over: list[dict[str, Tensor]] = []
        """Of each span, the gradients that were taken after each of its blocks."""

    def run_micro_batch(
        self, step: int, micro: int, number: int | None = None, *, hand_over: bool = False
    ) -> float:
        """Run data `micro`, as micro-batch `number` of the step."""
        ids_RL, batch = data_of(step, micro), MicroBatch(0)
        number = micro if number is None else number
        hidden_RLD = self.chain.embedder.embed_batch(ids_RL, torch.arange(12).expand(2, -1))
        for index, span in enumerate(self.spans):
            work = span.forward(step, number, hidden_RLD, batch)
            hidden_RLD = finish(self.with_loans(index, work))
        hidden_RLD.requires_grad_()
        loss = loss_of(self.chain.head.logits_with_gradients(hidden_RLD), ids_RL) / 2
        [grad_RLD] = torch.autograd.grad(loss, hidden_RLD)
        self.handed_over = [{} for _ in self.spans]
        for index, span in reversed(list(enumerate(self.spans))):
            work = self.with_loans(index, span.backward(step, number, grad_RLD))
            if hand_over:
                work = hand_over_after_blocks(span, work, self.handed_over[index])
            grad_RLD = finish(work)
        return float(loss.detach())

    def with_loans(self, index: int, work: BlockByBlock) -> BlockByBlock:
        """Give a span the parameters of each block that it asks for, and no others."""
        span = self.spans[index]
        while True:
            try:
                block = next(work)
            except StopIteration as ended:
                result: Tensor = ended.value
                return result
            if block is None:
                yield None
                continue
            lent: dict[str, Tensor] = {}
            for lender in self.lenders:
                lent |= lender.spans[index].lend(block)
            with pytest.raises(ProtocolError, match=f"other parameters than block {block} lacks"):
                span.fill(block, dict(list(lent.items())[1:]))
            span.fill(block, lent)

    def apply(self, step: int) -> None:
        scale = compute_clip_scale([s.compute_squared_norm(step) for s in self.spans], MAX_NORM)
        rate = learning_rate(step, self.optimizer)
        for span in self.spans:
            span.apply(step, micro_batches=2, learning_rate=rate, scale=scale)

    def run(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses += [self.run_micro_batch(step, micro) for micro in range(2)]
            self.apply(step)
        return losses

    def values(self) -> dict[str, Tensor]:
        return {
            name: value.detach().clone()
            for span in self.spans
            for name, value in span.blocks.parameters.items()
        }


def hand_over_after_blocks(
    span: SpanTrainer, work: BlockByBlock, handed_over: dict[str, Tensor]
) -> BlockByBlock:
    """Take the gradients after each block, as nodes do: never more than a block's are there."""
    largest = max(
        sum(4 * math.prod(s) for n, s in span.blocks.shapes.items() if block_of(n) == index)
        for index in range(span.blocks.span.start, span.blocks.span.end)
    )
    while True:
        try:
            next(work)
        except StopIteration as ended:
            handed_over |= span.take_gradients()
            result: Tensor = ended.value
            return result
        assert count_bytes(span)["gradients"] <= largest
        handed_over |= span.take_gradients()
        yield None


def count_bytes(span: SpanTrainer) -> dict[str, int]:
    """Bytes in float32 that a span's trainer holds, by kind."""
    values = list(span.blocks.parameters.values())
    assert span._optimizer is not None
    states = [
        state.nbytes
        for states in span._optimizer.state.values()
        for key, state in states.items()
        if key != "step"
    ]
    grads = [value.grad.nbytes for value in values if value.grad is not None]
    return {
        "parameters": sum(value.nbytes for value in values),
        "gradients": sum(grads),
        "optimizer": sum(states),
    }
