"""Fine-tuning with several nodes for each span, against PEFT on the combined batch in one process.

R rows, L tokens of each.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.adapter_folder import WEIGHTS_NAME
from nesa_node.client.training.finetuning_session import FinetuningOptions
from nesa_node.core.errors import ConfigError
from nesa_node.engine.training.adapters import FullConfig, OptimizerConfig
from nesa_node.engine.training.training_state import ZeroStage, assign_owners
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS, reference
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, remove_dropout
from tests.first_is_fast import first_is_fast
from tests.swarms import in_process_swarm, thirds

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(240)]
SEED = 5
STEPS = 6
RATE = 2e-3
MAX_NORM = 0.5
CONFIG: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
SGD = OptimizerConfig("sgd")


def make_batch(step: int) -> dict[str, Tensor]:
    ids_RL = torch.randint(3, 300, (5, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids_RL, "labels": ids_RL}


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remove_dropout(tiny("llama"), tmp_path_factory.mktemp("model"))


class Reference:
    """PEFT and torch's optimizers in one process."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(SEED)
        self.model: Any = peft.get_peft_model(reference(folder).float(), copy.deepcopy(CONFIG))
        self.model.train()
        self.values: dict[str, Any] = {
            name.replace(".default", ""): value
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }

    def backward(self, batch: dict[str, Tensor]) -> float:
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        return float(loss.detach())


def options(**more: Any) -> FinetuningOptions:
    # A row is a micro-batch.
    return FinetuningOptions(
        learning_rate=RATE, max_grad_norm=MAX_NORM, max_tokens=16, checkpoint_every=4, **more
    )


@pytest.mark.parametrize("stage", first_is_fast(1, 0, 2))
def test_two_replicas_train_as_one_process_does(
    stage: ZeroStage, folder: Path, tmp_path: Path
) -> None:
    theirs = Reference(folder)
    optimizer = torch.optim.AdamW(theirs.values.values(), lr=RATE, weight_decay=0.0)
    with (
        in_process_swarm(folder, [*thirds(BLOCKS), *thirds(BLOCKS)], tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(
            CONFIG, seed=SEED, options=options(replicas=2, zero_stage=stage)
        ) as session,
    ):
        assert set(Counter(str(hop.span) for hop in session.hops).values()) == {2}
        assert len({hop.peer_id for hop in session.hops}) == 6
        for step in range(STEPS):
            loss = theirs.backward(make_batch(step))
            norm = torch.nn.utils.clip_grad_norm_(theirs.values.values(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            result = session.step(make_batch(step))
            assert result.loss == pytest.approx(loss, rel=1e-5)
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert all(session.chain.seconds_by_peer[hop.peer_id] > 0 for hop in session.hops)
        session.save_pretrained(tmp_path / "adapter")
        held_out = session.evaluate(make_batch(99))
    found = load_file(tmp_path / "adapter" / WEIGHTS_NAME)
    assert found.keys() == theirs.values.keys()
    for name, value in found.items():
        assert distance(value, theirs.values[name].detach()) <= 1e-4, name
    theirs.model.eval()
    with torch.no_grad():
        assert held_out == pytest.approx(float(theirs.model(**make_batch(99)).loss), rel=1e-5)


def test_gradients_of_two_replicas_are_those_of_the_combined_batch(
    folder: Path, tmp_path: Path
) -> None:
    theirs = Reference(folder)
    before = {name: value.detach().clone() for name, value in theirs.values.items()}
    theirs.backward(make_batch(0))
    with (
        in_process_swarm(folder, [*thirds(BLOCKS), *thirds(BLOCKS)], tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(
            CONFIG,
            optimizer=SGD,
            seed=SEED,
            options=FinetuningOptions(max_grad_norm=None, max_tokens=16, replicas=2),
        ) as session,
    ):
        session.step(make_batch(0), learning_rate=1.0)
        session.save_pretrained(tmp_path / "adapter")
    for name, value in load_file(tmp_path / "adapter" / WEIGHTS_NAME).items():
        found = before[name].double() - value.double()
        if theirs.values[name].grad.abs().max() > 0:
            assert distance(found, theirs.values[name].grad.double()) <= 1e-5, name


def test_fewer_nodes_than_replicas(folder: Path, tmp_path: Path) -> None:
    """The first span has two nodes, which both work, the rest one each."""
    spans = [*thirds(BLOCKS), thirds(BLOCKS)[0]]
    losses = []
    with (
        in_process_swarm(folder, spans, tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
    ):
        for replicas in (1, 3):
            with model.finetuning_session(
                CONFIG, seed=SEED, options=options(replicas=replicas)
            ) as session:
                assert len(session.hops) == (3 if replicas == 1 else 4)
                losses.append([session.step(make_batch(step)).loss for step in range(3)])
                assert session.chain.seconds_by_peer.keys() == {h.peer_id for h in session.hops}
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_owners_have_equal_parts() -> None:
    sizes = {f"layer.{number}": size for number, size in enumerate([7, 5, 5, 4, 3, 3, 2, 1] * 5)}
    for count in (1, 2, 3, 5):
        owners = assign_owners(sizes, count)
        loads = Counter[int]()
        for name, rank in owners.items():
            loads[rank] += sizes[name]
        assert set(loads) == set(range(count))
        assert max(loads.values()) - min(loads.values()) <= 7
        assert owners == assign_owners(dict(reversed(sizes.items())), count)


@pytest.mark.parametrize("stage", first_is_fast(2, 0))
def test_gradients_of_adapters_travel_in_blockwise8(
    stage: ZeroStage, folder: Path, tmp_path: Path
) -> None:
    losses = []
    with in_process_swarm(folder, [*thirds(BLOCKS), *thirds(BLOCKS)], tmp_path) as addresses:
        for quality in ("exact", "blockwise8"):
            with (
                AutoDistributedModelForCausalLM.from_pretrained(
                    folder, initial_peers=addresses, dtype=torch.float32, quality=quality
                ) as model,
                model.finetuning_session(
                    CONFIG, seed=SEED, options=options(replicas=2, zero_stage=stage)
                ) as session,
            ):
                for group in session.chain._nodes.groups:
                    codecs = {link.gradient_codec.partition("@")[0] for link in group.links}
                    assert codecs == {"none" if quality == "exact" else "blockwise8"}
                losses.append([session.step(make_batch(step % 2)).loss for step in range(STEPS)])
    exact, lossy = losses
    assert exact[-1] < exact[0]
    assert lossy != exact
    assert lossy == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("stage", first_is_fast(3, 0, 2))
def test_the_weights_themselves_are_trained(stage: ZeroStage, folder: Path, tmp_path: Path) -> None:
    model_alone = reference(folder).float().train()
    layers = model_alone.get_submodule("model.layers")
    layers.requires_grad_(True)
    values = list(layers.parameters())
    optimizer = torch.optim.AdamW(values, lr=RATE, weight_decay=0.0)
    with (
        in_process_swarm(folder, [*thirds(BLOCKS), *thirds(BLOCKS)], tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(
            FullConfig(), options=options(replicas=2, zero_stage=stage)
        ) as session,
    ):
        for step in range(4):
            loss = model_alone(**make_batch(step), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(values, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            assert session.step(make_batch(step)).loss == pytest.approx(
                float(loss.detach()), rel=1e-4
            )
        session.save_pretrained(tmp_path / "trained")
        held_out = session.evaluate(make_batch(99))
    for name, value in load_file(tmp_path / "trained" / "model.safetensors").items():
        assert distance(value, model_alone.state_dict()[name]) <= 1e-4, name
    loaded = reference(tmp_path / "trained").float().eval()
    with torch.no_grad():
        assert held_out == pytest.approx(float(loaded(**make_batch(99)).loss), rel=1e-5)


@pytest.mark.parametrize("name", first_is_fast("sgd", "adamw"))
def test_replicas_that_are_averaged(name: Any, folder: Path, tmp_path: Path) -> None:
    """Each trains on its rows alone for three steps; the seventh is followed by a checkpoint."""
    optimizer = OptimizerConfig(name, momentum=0.9 if name == "sgd" else 0.0)
    every, steps = 3, 7
    copies = [Reference(folder) for _ in range(2)]
    optimizers = [optimizer.make(list(each.values.values())) for each in copies]
    for step in range(steps):
        rows = make_batch(step)["input_ids"]
        # Norms are of both together, since both are clipped by one factor.
        squares = 0.0
        for at, each in enumerate(copies):
            part = rows[at::2]
            # Of the mean over all rows its part, twice.
            loss = each.model(input_ids=part, labels=part, use_cache=False).loss
            (2 * loss * len(part) / len(rows)).backward()
            squares += sum(float(v.grad.square().sum()) for v in each.values.values()) / 2
        for each, made in zip(copies, optimizers, strict=True):
            assert made is not None
            for value in each.values.values():
                value.grad *= min(1.0, MAX_NORM / (squares**0.5 + 1e-6))
            made.param_groups[0]["lr"] = RATE
            made.step()
            made.zero_grad()
        if (step + 1) % every == 0 or step == steps - 1:
            average_copies(copies, optimizers)
    limits = FinetuningOptions(
        learning_rate=RATE, max_grad_norm=MAX_NORM, max_tokens=16, replicas=2, average_every=every
    )
    with (
        in_process_swarm(folder, [*thirds(BLOCKS), *thirds(BLOCKS)], tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(CONFIG, optimizer=optimizer, seed=SEED, options=limits) as session,
    ):
        for step in range(steps):
            session.step(make_batch(step))
        session.save_pretrained(tmp_path / "adapter")
    for key, value in load_file(tmp_path / "adapter" / WEIGHTS_NAME).items():
        assert distance(value, copies[0].values[key].detach()) <= 1e-4, key


def average_copies(copies: list[Reference], optimizers: list[Any]) -> None:
    """Give both models the mean of their values and of their optimizers' states."""
    with torch.no_grad():
        for values in zip(*(each.values.values() for each in copies), strict=True):
            groups = [list(values)]
            states = [made.state[v] for made, v in zip(optimizers, values, strict=True)]
            groups += [[state[key] for state in states] for key in states[0]]
            for group in groups:
                mean = sum(each.clone() for each in group) / len(group)
                for each in group:
                    each.copy_(mean)


def test_averaging_needs_whole_replicas() -> None:
    with pytest.raises(ConfigError, match="zero_stage=0"):
        FinetuningOptions(replicas=2, average_every=4, zero_stage=1)
    with pytest.raises(ConfigError, match="average_every must be at least 1"):
        FinetuningOptions(average_every=0)
