"""Steps of spans' optimizers, against PEFT and torch's optimizers in one process."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import ConfigError, ProtocolError
from nesa_node.engine.training.adapted_blocks import MicroBatch
from nesa_node.engine.training.adapters import OptimizerConfig
from nesa_node.engine.training.kept_micro_batches import Keep, KeptRoom
from nesa_node.engine.training.span_trainer import compute_clip_scale, finish
from tests.engine.chained import distance
from tests.engine.tiny_models import reference, save_tiny_model
from tests.engine.training.local_session import (
    CONFIG,
    MAX_NORM,
    STEPS,
    Session,
    data_of,
    learning_rate,
    loss_of,
)
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, SEED, remove_dropout

pytestmark = PEFT_WARNINGS


def train_reference(folder: Path, optimizer: str) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(SEED)
    model: Any = peft.get_peft_model(reference(folder).float(), copy.deepcopy(CONFIG))
    model.train()
    values = [value for value in model.parameters() if value.requires_grad]
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    extra: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    made = kinds[optimizer](values, weight_decay=0.01, **extra)
    losses = []
    for step in range(STEPS):
        made.param_groups[0]["lr"] = learning_rate(step, optimizer)
        made.zero_grad()
        for micro in range(2):
            ids_RL = data_of(step, micro)
            loss = loss_of(model(input_ids=ids_RL, use_cache=False).logits, ids_RL) / 2
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(values, MAX_NORM)
        made.step()
    found = {
        name.replace(".default", ""): value.detach()
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    return found, losses


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [*((family, "adamw") for family in ("llama", "gpt2", "qwen3", "mixtral")), ("llama", "sgd")],
)
def test_fifty_steps_are_those_of_peft(
    family: str, optimizer: str, models_dir: Path, tmp_path: Path
) -> None:
    folder = remove_dropout(save_tiny_model(family, models_dir), tmp_path)
    expected, expected_losses = train_reference(folder, optimizer)
    session = Session(folder, optimizer)
    losses = session.run(range(STEPS))
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[-1] < 0.995 * losses[0]
    for name, value in session.values().items():
        assert distance(value, expected[name]) < 1e-4, name


def test_a_restored_session_continues_bit_for_bit(models_dir: Path) -> None:
    folder = save_tiny_model("llama", models_dir)
    undisturbed = Session(folder)
    undisturbed.run(range(6))
    session = Session(folder)
    session.run(range(3))
    kept = [span.export() for span in session.spans]
    session.run(range(3, 5))
    session.run_micro_batch(5, 0)
    # One span is lost, and all return to the checkpoint.
    session.spans[1] = Session(folder).spans[1]
    for span, tensors in zip(session.spans, kept, strict=True):
        span.restore(3, tensors)
        assert span.kept_bytes == span.num_backwards == 0
    session.run(range(3, 6))
    for name, value in undisturbed.values().items():
        assert torch.equal(session.values()[name], value), name


def test_a_step_that_begins_again_gives_the_same_bits(models_dir: Path) -> None:
    folder = save_tiny_model("llama", models_dir)
    sessions = [Session(folder), Session(folder)]
    sessions[0].run_micro_batch(0, 0)
    for span in sessions[0].spans:
        span.begin(0)
    for session in sessions:
        session.run(range(1))
    first, second = (session.values() for session in sessions)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_kept_of_a_micro_batch_changes_no_bit(models_dir: Path) -> None:
    folder = save_tiny_model("llama", models_dir)
    kinds: list[Keep] = ["input", "inputs", "activations"]
    sessions = [Session(folder, keep=keep) for keep in kinds]
    losses = [session.run(range(2)) for session in sessions]
    assert losses[0] == losses[1] == losses[2]
    first, *others = [session.values() for session in sessions]
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())
    kept = []
    for session in sessions:
        finish(session.spans[0].forward(2, 0, torch.ones(2, 12, 64), MicroBatch(0)))
        kept.append(session.spans[0].kept_bytes)
    assert kept == [2 * 12 * 64 * 4, 2 * 2 * 12 * 64 * 4, 2 * 2 * 12 * 64 * 4]


def test_as_much_is_kept_as_leaves_room_for_the_rest(models_dir: Path) -> None:
    """Micro-batches of 24 tokens, five at most: 100 bytes a token with activations, 10 and 1."""
    token_bytes: dict[Keep, int] = {"input": 1, "inputs": 10, "activations": 100}

    def kept_of(nbytes: int) -> list[str]:
        room = KeptRoom(nbytes, 5 * 24, token_bytes)
        folder = save_tiny_model("llama", models_dir)
        session = Session(folder, keep=room)
        span, ids_RL = session.spans[0], torch.ones(2, 12, dtype=torch.int64)
        hidden_RLD = session.chain.embedder.embed_batch(ids_RL, torch.arange(12).expand(2, -1))
        for number in range(5):
            finish(span.forward(0, number, hidden_RLD, MicroBatch(0)))
        found = [each.keep for each in span._kept.values()]
        assert sum(24 * token_bytes[keep] for keep in found) <= nbytes
        for number in range(5):
            finish(span.backward(0, number, torch.ones_like(hidden_RLD)))
        return [keep.replace("activations", "all") for keep in found]

    assert kept_of(5 * 24) == ["input"] * 5
    assert kept_of(5 * 24 + 24 * 9 + 1) == ["inputs", *["input"] * 4]
    assert kept_of(24 * 220) == ["all", "all", "inputs", "input", "input"]
    assert kept_of(24 * 500) == ["all"] * 5


def test_a_forward_or_backward_ends_where_its_step_begins_again(models_dir: Path) -> None:
    session = Session(save_tiny_model("llama", models_dir))
    [span, *_] = session.spans
    hidden_RLD = torch.ones(2, 12, 64)
    running = span.forward(0, 0, hidden_RLD, MicroBatch(0))
    next(running)
    span.begin(0)
    with pytest.raises(ProtocolError, match="has begun again"):
        finish(running)
    assert span.kept_bytes == 0
    finish(span.forward(0, 0, hidden_RLD, MicroBatch(0)))
    running = span.backward(0, 0, hidden_RLD)
    next(running)
    span.begin(0)
    with pytest.raises(ProtocolError, match="has begun again"):
        finish(running)
    assert span.num_backwards == 0
    assert all(value.grad is None for value in span.blocks.parameters.values())


def test_no_step_is_applied_twice_or_skipped(models_dir: Path) -> None:
    session = Session(save_tiny_model("llama", models_dir))
    session.run(range(2))
    values, [span, *_] = session.values(), session.spans
    span.apply(1, micro_batches=2, learning_rate=0.1, scale=1.0)
    assert all(torch.equal(session.values()[name], value) for name, value in values.items())
    hidden_RLD = torch.zeros(2, 12, 64)
    for step in (0, 1, 3):
        for call in (
            lambda step=step: span.begin(step),
            lambda step=step: finish(span.forward(step, 0, hidden_RLD, MicroBatch(0))),
            lambda step=step: finish(span.backward(step, 0, hidden_RLD)),
            lambda step=step: span.compute_squared_norm(step),
        ):
            with pytest.raises(ProtocolError, match=f"step {step} is not the next: 2"):
                call()
    with pytest.raises(ProtocolError, match="step 3 is not the next"):
        span.apply(3, micro_batches=2, learning_rate=0.1, scale=1.0)
    session.run_micro_batch(2, 0)
    with pytest.raises(ProtocolError, match="gradients of 1 micro-batches, not of 2"):
        span.apply(2, micro_batches=2, learning_rate=0.1, scale=1.0)
    with pytest.raises(ProtocolError, match="micro-batch 0 has gone backward"):
        finish(span.forward(2, 0, hidden_RLD, MicroBatch(0)))
    finish(span.forward(2, 2, hidden_RLD, MicroBatch(0)))
    with pytest.raises(ProtocolError, match="micro-batch 2 cannot go backward: 1 is the next"):
        finish(span.backward(2, 2, hidden_RLD))
    assert span.applied == 2


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(number: float, models_dir: Path) -> None:
    [span, *_] = Session(save_tiny_model("llama", models_dir)).spans
    good_RLD = torch.ones(1, 4, 64)
    bad_RLD = good_RLD.clone()
    bad_RLD[0, 2, 3] = number
    with pytest.raises(ProtocolError, match="hidden states of micro-batch 0: not all"):
        finish(span.forward(0, 0, bad_RLD, MicroBatch(0)))
    finish(span.forward(0, 0, good_RLD, MicroBatch(0)))
    with pytest.raises(ProtocolError, match="gradient of micro-batch 0: not all"):
        finish(span.backward(0, 0, bad_RLD))
    with pytest.raises(ProtocolError, match=r"gradient of shape \[1, 3, 64\]"):
        finish(span.backward(0, 0, good_RLD[:, :3]))
    finish(span.backward(0, 0, 1e30 * good_RLD))  # its square overflows no double
    with pytest.raises(ProtocolError, match="the gradients of step 0 are not finite"):
        span.apply(0, micro_batches=1, learning_rate=1.0, scale=number)
    with pytest.raises(ProtocolError, match="the gradients of step 0 are not finite"):
        span.apply(0, micro_batches=1, learning_rate=number, scale=1.0)
    assert span.applied == 0


def test_states_of_other_spans_are_refused(models_dir: Path) -> None:
    first, second, _ = Session(save_tiny_model("llama", models_dir)).spans
    own, before = first.export(), first.export()
    name = next(iter(own))
    owner = name.removeprefix("adapter.")
    keys = ("step", "exp_avg", "exp_avg_sq")
    count, mean, square = (f"optimizer.{key}.{owner}" for key in keys)
    whole = own | {count: torch.tensor(1.0), mean: own[name], square: own[name].square()}
    for wrong, said in (
        (own | {mean: own[name]}, "lacks optimizer.step"),
        (own | {f"optimizer.other.{owner}": own[name]}, "another span or adapter: optimizer.other"),
        (whole | {mean: torch.tensor(1.0)}, "has shape"),
        (whole | {count: torch.tensor(-1.0)}, "is negative"),
        (whole | {square: -own[name].square() - 1}, "is negative"),
        (whole | {name: own[name].half()}, "a state is in float32"),
        (second.export(), "lacks adapter.base_model.model.model.layers.0"),
        (own | second.export(), "another span or adapter: adapter.*layers.2"),
        (own | {name: own[name][:1, :2]}, "has shape"),
        (own | {name: own[name] * math.nan}, "not all numbers are finite"),
        (own | {"other": own[name]}, "another span or adapter: other"),
    ):
        with pytest.raises(ProtocolError, match=said):
            first.restore(1, wrong)
    first.state_shapes.check(whole)
    assert first.applied == 0
    assert all(torch.equal(value, before[name]) for name, value in first.export().items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "adam"}, "'adam': use adamw or sgd"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"eps": -1.0}, "eps must be"),
        ({"weight_decay": math.nan}, "weight_decay must be"),
        ({"momentum": math.inf}, "momentum must be"),
    ],
)
def test_wrong_settings_of_an_optimizer(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OptimizerConfig(**settings)


def test_clipping_is_torchs() -> None:
    values = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
    for number, value in enumerate(values):
        value.grad = torch.full((5,), 1.0 + number)
    squares = [float(value.grad.square().sum()) for value in values if value.grad is not None]
    scale = compute_clip_scale(squares, 2.0)
    torch.nn.utils.clip_grad_norm_(values, 2.0)
    assert values[1].grad is not None
    assert float(values[1].grad[0]) == pytest.approx(2.0 * scale, rel=1e-6)
    assert compute_clip_scale(squares, None) == compute_clip_scale(squares, 1e6) == 1.0
