"""Replicas of a span: what each holds by stage of ZeRO, and what it takes from the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from nesa_node.core.errors import ProtocolError
from nesa_node.engine.training.adapters import FullConfig, OptimizerConfig
from nesa_node.engine.training.span_trainer import SpanTrainer
from nesa_node.engine.training.training_state import Partition, ZeroStage, assign_owners
from tests.engine.chained import Chain
from tests.engine.tiny_models import save_tiny_model
from tests.engine.training.local_session import CONFIG, Session, count_bytes
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, adapt

pytestmark = PEFT_WARNINGS


@pytest.mark.parametrize(
    ("stage", "adapter", "per_number"),
    [
        (0, CONFIG, 16),
        (1, CONFIG, 8 + 8 / 2),
        (2, CONFIG, 4 + 12 / 2),
        (2, FullConfig(), 4 + 12 / 2),
        (3, FullConfig(), 16 / 2),
    ],
    ids=["0", "1", "2", "2 of weights", "3 of weights"],
)
def test_bytes_of_replicas_are_those_of_zeros_arithmetic(
    stage: ZeroStage, adapter: Any, per_number: float, models_dir: Path
) -> None:
    """Of two replicas, before the update: 4 bytes of each parameter, 4 of its gradient, 8 of AdamW.

    Stage 1 divides AdamW's by two, stage 2 also the gradient's, stage 3 the parameter's.
    """
    folder = save_tiny_model("llama", models_dir)
    replicas = [
        Session(folder, adapter=adapter, partition=Partition(stage, rank, 2)) for rank in range(2)
    ]
    if stage == 3:
        for rank, replica in enumerate(replicas):
            replica.lenders = [replicas[1 - rank]]
    for step in range(2):
        for rank, replica in enumerate(replicas):
            replica.run_micro_batch(step, rank, number=0, hand_over=stage >= 2)
        for index in range(3):
            spans = [replica.spans[index] for replica in replicas]
            sizes = {f"adapter.{n}": math.prod(s) for n, s in spans[0].blocks.shapes.items()}
            owners = assign_owners(sizes, 2)
            held = [
                span.take_gradients() if stage < 2 else replica.handed_over[index]
                for span, replica in zip(spans, replicas, strict=True)
            ]
            sums = {name: held[0][name] + held[1][name] for name in sizes}
            for rank, span in enumerate(spans):
                own = {n: g for n, g in sums.items() if stage == 0 or owners[n] == rank}
                if stage < 2:  # what each has computed is there until all of it is handed over
                    for name, grad in held[rank].items():
                        span.blocks.parameters[name.removeprefix("adapter.")].grad = grad
                    before = count_bytes(span)
                    span.reduce(step, own)
                else:
                    span.reduce(step, own)
                    before = count_bytes(span)
                if step:
                    numbers = sum(sizes.values())
                    assert sum(before.values()) == pytest.approx(per_number * numbers, rel=0.05)
                span.apply(step, micro_batches=2, learning_rate=0.1, scale=1.0)
            if stage in (1, 2):
                for rank, span in enumerate(spans):
                    other = spans[1 - rank].export_updated(step + 1)
                    span.set_parameters(step + 1, other)
    first, second = replicas
    if stage < 3:
        values = first.values(), second.values()
        assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    else:
        check_divided_weights(first, second, folder)


def check_divided_weights(first: Session, second: Session, folder: Path) -> None:
    """Both have their halves of what one replica with both micro-batches has."""
    alone = Session(folder, adapter=FullConfig())
    for step in range(2):
        for micro in range(2):
            alone.run_micro_batch(step, micro)
        for span in alone.spans:
            span.apply(step, micro_batches=2, learning_rate=0.1, scale=1.0)
    for spans in zip(first.spans, second.spans, alone.spans, strict=True):
        one, other, whole = (
            {n: v for n, v in span.export().items() if n.startswith("adapter.")} for span in spans
        )
        assert not one.keys() & other.keys()
        assert one.keys() | other.keys() == whole.keys()
        for name, value in (one | other).items():
            # Gradients were added in the same order.
            assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("partitions", [2, 3, 5])
def test_few_tensors_are_divided_among_nodes(partitions: int, models_dir: Path) -> None:
    """One layer of one block has adapters: some nodes have half of them, the rest none."""
    folder = save_tiny_model("llama", models_dir)
    config: Any = peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[0])
    adapted = adapt(Chain(folder), folder, config)[0]
    values = {f"adapter.{name}": value.detach() for name, value in adapted.parameters.items()}
    owners = assign_owners({name: value.numel() for name, value in values.items()}, partitions)
    for rank in range(partitions):
        span = SpanTrainer(adapted, OptimizerConfig(), partition=Partition(1, rank, partitions))
        part = {name: value for name, value in values.items() if owners[name] == rank}
        span.reduce(0, part)
        span.apply(0, micro_batches=1, learning_rate=0.1, scale=1.0)
        assert span.export_updated(1).keys() == part.keys()


def test_more_than_the_share_is_refused(models_dir: Path) -> None:
    folder = save_tiny_model("llama", models_dir)
    [adapted, *_] = adapt(Chain(folder), folder, CONFIG)
    span = SpanTrainer(adapted, OptimizerConfig(), partition=Partition(1, 0, 3))
    whole = {name: value for name, value in span.export().items() if name.startswith("adapter.")}
    owners = assign_owners({name: value.numel() for name, value in whole.items()}, 3)
    part = {name: value for name, value in whole.items() if owners[name] == 0}
    span.reduce(0, part)
    span.apply(0, micro_batches=1, learning_rate=0.1, scale=1.0)
    kept = span.export()
    for wrong in (whole, {name: value for name, value in whole.items() if owners[name] > 0}):
        with pytest.raises(ProtocolError, match="another replica updates"):
            span.reduce(1, wrong)
    moments = {
        f"optimizer.{key}.{name.removeprefix('adapter.')}": (
            torch.tensor(1.0) if key == "step" else value.square()
        )
        for name, value in whole.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    with pytest.raises(ProtocolError, match="another replica updates"):
        span.restore(1, whole | moments)
    assert all(torch.equal(value, kept[name]) for name, value in span.export().items())
    span.restore(1, kept)
    for wrong, said in (
        ({"adapter.other": torch.ones(1)}, "no parameter of this span"),
        ({next(iter(moments)): torch.tensor(1.0)}, "no parameter of this span"),
        ({name: value * math.inf for name, value in part.items()}, "not all numbers are finite"),
        ({name: value.flatten() for name, value in part.items()}, "has shape"),
    ):
        for call in (span.reduce, span.set_parameters):
            with pytest.raises(ProtocolError, match=said):
                call(1, wrong)
    with pytest.raises(ProtocolError, match="gradients of 0 micro-batches, not of 1"):
        span.collect(1, 1)
    with pytest.raises(ProtocolError, match="step 0 is not the next"):
        span.collect(0, 1)
    with pytest.raises(ProtocolError, match="step 0 is not the next"):
        span.export_updated(0)
