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
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks, MicroBatch
from nesa_node.engine.training.adapters import FullConfig, OptimizerConfig
from nesa_node.engine.training.span_trainer import (
    BlockByBlock,
    Keep,
    KeptRoom,
    SpanTrainer,
    compute_clip_scale,
    finish,
)
from nesa_node.engine.training.training_state import Partition, ZeroStage, assign_owners, block_of
from tests.engine.chained import Chain, distance, open_local
from tests.engine.tiny_models import reference, save_tiny_model
from tests.engine.training.test_adapted_blocks import (
    PEFT_WARNINGS,
    SEED,
    adapt,
    remove_dropout,
)

pytestmark = PEFT_WARNINGS
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
