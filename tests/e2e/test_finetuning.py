"""Fine-tuning through three nodes, against PEFT and torch's optimizers in one process.

R rows, L tokens of each, V vocabulary.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from torch import Tensor

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.adapter_folder import WEIGHTS_NAME
from nesa_node.client.training.data.batches import MicroBatchData
from nesa_node.client.training.finetuning_session import FinetuningOptions
from nesa_node.core.errors import ConfigError, RefusedError, StreamClosedError
from nesa_node.core.metrics import WIRE_BYTES
from nesa_node.engine.training.adapters import (
    BottleneckConfig,
    DeepPromptConfig,
    OptimizerConfig,
)
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.swarm.dht.training_notices import SessionPlan, TrainingNotice
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.link_measurements import LinkSpeeds
from tests.engine.chained import distance, open_local
from tests.engine.tiny_models import BLOCKS, reference
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, remove_dropout
from tests.first_is_fast import first_is_fast
from tests.swarms import in_process_swarm, thirds

pytestmark = PEFT_WARNINGS
SEED = 5
STEPS = 6
RATE = 2e-3
MAX_NORM = 0.5
CONFIG: Any = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
PROMPT: Any = peft.PromptTuningConfig(
    task_type="CAUSAL_LM", num_virtual_tokens=5, prompt_tuning_init="SAMPLE_VOCAB"
)


def make_batch(step: int) -> dict[str, Tensor]:
    """Three rows of different lengths, padded at the right."""
    generator = torch.Generator().manual_seed(step)
    ids_RL = torch.randint(3, 300, (3, 20), generator=generator)
    mask_RL = (torch.arange(20) < torch.tensor([[20], [13], [17]])).long()
    labels_RL = torch.where(mask_RL.bool(), ids_RL, -100)
    labels_RL[:, :4] = -100
    return {"input_ids": ids_RL, "attention_mask": mask_RL, "labels": labels_RL}


def train_reference(
    folder: Path, steps: int, config: Any = CONFIG, *, max_norm: float = MAX_NORM
) -> tuple[Any, list[float], list[float]]:
    torch.manual_seed(SEED)
    model: Any = peft.get_peft_model(reference(folder).float(), copy.deepcopy(config))
    model.train()
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    losses, norms = [], []
    for step in range(steps):
        loss = model(**make_batch(step), use_cache=False).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses, norms


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remove_dropout(tiny("llama"), tmp_path_factory.mktemp("model"))


def options(**more: Any) -> FinetuningOptions:
    # Two rows fit into a micro-batch.
    wanted: dict[str, Any] = {"max_grad_norm": MAX_NORM, "max_tokens": 40, "checkpoint_every": 4}
    return FinetuningOptions(learning_rate=RATE, **(wanted | more))


def test_losses_and_adapters_equal_those_of_one_process(folder: Path, tmp_path: Path) -> None:
    expected, losses, norms = train_reference(folder, STEPS)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(CONFIG, seed=SEED, options=options()) as session,
    ):
        for step in range(STEPS):
            result = session.step(make_batch(step))
            assert result.loss == pytest.approx(losses[step], rel=1e-5)
            assert result.grad_norm == pytest.approx(norms[step], rel=1e-5)
        assert session.applied == STEPS
        session.save_pretrained(tmp_path / "adapter")
        held_out = session.evaluate(make_batch(99))
    loaded: Any = peft.PeftModel.from_pretrained(reference(folder).float(), tmp_path / "adapter")
    theirs = dict(expected.named_parameters())
    trained = [name for name, value in theirs.items() if value.requires_grad]
    for name, value in loaded.named_parameters():
        if name in trained:
            assert distance(value.detach(), theirs[name].detach()) <= 1e-4, name
    loaded.eval()
    with torch.no_grad():
        assert held_out == pytest.approx(float(loaded(**make_batch(99)).loss), rel=1e-5)


def test_blocks_of_the_client_are_trained_too(folder: Path, tmp_path: Path) -> None:
    expected, losses, norms = train_reference(folder, 3)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, client_blocks=(1, 1)
        ) as model,
        model.finetuning_session(CONFIG, seed=SEED, options=options()) as session,
    ):
        assert [str(hop.span) for hop in session.hops] == ["1:2", "2:4", "4:5"]
        for step in range(3):
            result = session.step(make_batch(step))
            assert result.loss == pytest.approx(losses[step], rel=1e-5)
            assert result.grad_norm == pytest.approx(norms[step], rel=1e-5)
        session.save_pretrained(tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / WEIGHTS_NAME)
    theirs = {
        name.replace(".default", ""): value.detach()
        for name, value in expected.named_parameters()
        if value.requires_grad
    }
    assert found.keys() == theirs.keys()
    for name, value in found.items():
        assert distance(value, theirs[name]) <= 1e-4, name


def test_a_session_announces_its_plan(folder: Path, tmp_path: Path) -> None:
    model_id = compute_model_id(open_local(folder))
    limits = FinetuningOptions(max_tokens=64, data_digest="1e" * 32, objective="a loss of mine")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])

    async def read(addresses: tuple[str, ...]) -> list[SessionPlan]:
        """As any peer does."""
        identity = Identity.ephemeral(tmp_path)
        async with open_swarm(identity, initial_peers=addresses, listen=False) as swarm:
            notices = await swarm.notices.fetch(TrainingNotice, model_id)
        return [plan for notice in notices for plan in notice.plans]

    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
    ):
        with model.finetuning_session(config, options=limits):
            [first] = asyncio.run(read(addresses))
            assert (first.objective, first.data) == ("a loss of mine", "1e" * 32)
            assert (first.max_tokens, first.replicas, first.average_every) == (64, 1, 1)
            with model.finetuning_session(config, options=limits, seed=1):
                other = {plan.session: plan for plan in asyncio.run(read(addresses))}
            assert other.pop(first.session) == first
            [second] = other.values()
            assert second.spec != first.spec
            assert asyncio.run(read(addresses)) == [first]
        assert asyncio.run(read(addresses)) == []


@pytest.mark.parametrize("quality", ["exact", "blockwise8"])
def test_what_is_sent_is_counted_as_received(
    quality: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[LinkSpeeds] = []
    construct = LinkSpeeds.__init__

    def construct_and_keep(self: LinkSpeeds, *args: Any, **more: Any) -> None:
        construct(self, *args, **more)
        found.append(self)

    monkeypatch.setattr(LinkSpeeds, "__init__", construct_and_keep)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, quality=quality
        ) as model,
        model.finetuning_session(CONFIG, seed=SEED, options=options()) as session,
    ):
        session.step(make_batch(0))
        counts = dict.fromkeys(("sent", "received"), 0.0)
        for metric, labels, value in model.samples():
            if metric is WIRE_BYTES and isinstance(value, int | float):
                counts[labels[1]] += value
    assert counts["sent"] == counts["received"] > 0
    sent = sum((each.sent_bytes for each in found), Counter[str]())
    received = sum((each.received_bytes for each in found), Counter[str]())
    assert sent == received
    # 50 tokens forward and back to each of three nodes, and their gradients; 32 bits a value.
    values = 50 * 2 * 2 * 3 * model.config.hidden_size
    if quality == "exact":
        assert sent == {"none": 4 * values}
    else:
        assert sum(sent.values()) < 2 * values


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", peft.IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"])),
        ("qwen3", BottleneckConfig(8)),
        ("mixtral", DeepPromptConfig(4)),
    ],
)
def test_every_kind_of_adapter_lowers_the_loss(
    family: str, config: Any, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny(family)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(config, seed=SEED, options=options()) as session,
    ):
        before = session.evaluate(make_batch(0))
        for _ in range(8):
            session.step(make_batch(0), learning_rate=2e-2)
        assert session.evaluate(make_batch(0)) < before - 0.02


@pytest.mark.parametrize("family", first_is_fast("llama", "gpt2"))
def test_a_shallow_prompt_equals_that_of_one_process(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Fifty steps, each of them clipped."""
    folder = remove_dropout(tiny(family), tmp_path)
    limit, steps = 1e-3, 50
    expected, losses, norms = train_reference(folder, steps, PROMPT, max_norm=limit)
    assert min(norms) > limit
    first, _, _ = train_reference(folder, 0, PROMPT)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(
            PROMPT, seed=SEED, options=options(max_tokens=50, max_grad_norm=limit)
        ) as session,
    ):
        session.save_pretrained(tmp_path / "untrained")
        for step in range(steps):
            result = session.step(make_batch(step))
            assert result.loss == pytest.approx(losses[step], rel=1e-5)
            assert result.grad_norm == pytest.approx(norms[step], rel=1e-5)
        session.save_pretrained(tmp_path / "adapter")
        held_out = session.evaluate(make_batch(99))
    [untrained] = load_file(tmp_path / "untrained" / WEIGHTS_NAME).values()
    assert torch.equal(untrained, prompt_of(first))
    loaded: Any = peft.PeftModel.from_pretrained(reference(folder).float(), tmp_path / "adapter")
    loaded.eval()
    assert distance(prompt_of(loaded), prompt_of(expected)) <= 1e-4
    assert distance(prompt_of(loaded), untrained) > 1e-2
    with torch.no_grad():
        assert held_out == pytest.approx(float(loaded(**make_batch(99)).loss), rel=1e-5)


def prompt_of(model: Any) -> Tensor:
    found: Tensor = model.prompt_encoder["default"].embedding.weight.detach()
    return found


def test_a_shallow_prompt_continues_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    """And after the loss of a node, whose steps run again: with the same bits."""
    file = tmp_path / "checkpoint"
    batch, packed = make_batch(3), pack(make_batch(3))
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
    ):

        def train(name: str, steps: int, lose_at: int = -1, **more: Any) -> int:
            wanted = options(max_tokens=65, **more)
            with model.finetuning_session(PROMPT, seed=SEED, options=wanted) as session:
                assert session.evaluate([packed]) == pytest.approx(session.evaluate(batch))
                start = session.applied
                while session.applied < steps:
                    if session.applied == lose_at:
                        link = session.chain._nodes.groups[1].links[0]
                        link._questions.fail(StreamClosedError("lost"))
                    session.step([packed] if session.applied % 2 else make_batch(session.applied))
                assert session.chain.recoveries >= int(lose_at >= 0)
                session.save_pretrained(tmp_path / name)
            return start

        train("whole", 7)
        assert train("parts", 6, lose_at=3, checkpoint_path=file) == 0
        # The last checkpoint was that of the fourth step.
        assert train("parts", 7, checkpoint_path=file) == 4
        other = copy.deepcopy(PROMPT)
        other.num_virtual_tokens += 1
        for config in (other, None):
            with pytest.raises(ConfigError, match="the adapters, optimizer or seed differed"):
                model.finetuning_session(
                    config or CONFIG, seed=SEED, options=options(checkpoint_path=file)
                )
        with (
            model.finetuning_session(PROMPT, options=options(max_tokens=24)) as session,
            pytest.raises(ConfigError, match="a row of 25 tokens; this session takes at most 24"),
        ):
            session.step(batch)
    mine, theirs = (tmp_path / name / WEIGHTS_NAME for name in ("parts", "whole"))
    assert mine.read_bytes() == theirs.read_bytes()


def pack(batch: dict[str, Tensor]) -> MicroBatchData:
    """The texts of a batch in one row."""
    lengths = batch["attention_mask"].sum(1).tolist()
    ids, labels = (
        torch.cat([row[:n] for row, n in zip(batch[name], lengths, strict=True)])
        for name in ("input_ids", "labels")
    )
    return MicroBatchData(ids[None], labels[None], (tuple(lengths),), int((labels != -100).sum()))


def test_texts_that_share_a_row_do_not_see_each_other(folder: Path, tmp_path: Path) -> None:
    batch = make_batch(3)
    packed = pack(batch)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
        model.finetuning_session(
            CONFIG, seed=SEED, options=FinetuningOptions(max_tokens=60)
        ) as session,
    ):
        apart, together = session.evaluate(batch), session.evaluate([packed])
        assert together == pytest.approx(apart, rel=1e-5)
        with pytest.raises(ConfigError, match="all are -100"):
            session.step({"input_ids": batch["input_ids"], "labels": batch["labels"] * 0 - 100})
        targets = replace(packed, labels_RL=packed.ids_RL)
        with pytest.raises(ConfigError, match=r"first token of a text \(row 0, position 0\)"):
            session.step([targets])
        with pytest.raises(ConfigError, match="at most 60"):
            session.step(
                {"input_ids": torch.ones(1, 61).long(), "labels": torch.ones(1, 61).long()}
            )


def test_what_nodes_do_not_train_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path, training_gib=0) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, recovery_timeout_s=3
        ) as model,
    ):
        for config, words in (
            (peft.LoraConfig(use_dora=True), "use_dora"),
            (peft.LoraConfig(modules_to_save=["lm_head"]), "modules_to_save"),
            (peft.LoraConfig(target_modules="nothing_.*"), "fits no module"),
            (peft.LoraConfig(r=5000), "5000|1024"),
            (peft.PrefixTuningConfig(num_virtual_tokens=3), "PREFIX_TUNING adapters cannot"),
            (peft.PromptEncoderConfig(num_virtual_tokens=3), "P_TUNING adapters cannot"),
            (peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3), "CAUSAL_LM"),
        ):
            with pytest.raises(ConfigError, match=words):
                model.finetuning_session(config)
        with pytest.raises(RefusedError, match="lends no memory"), capture_logs() as logged:
            model.finetuning_session(CONFIG)
        waits = [each["reason"] for each in logged if each["event"] == "training_interrupted"]
        assert len(waits) == len(set(waits)) > 0


def test_training_goes_on_with_an_adapter(folder: Path, tmp_path: Path) -> None:
    """PEFT trains three steps and saves; the swarm's next step is PEFT's next one."""
    expected, _, _ = train_reference(folder, 3)
    expected.save_pretrained(tmp_path / "begun")
    losses, norms = [], []
    for step in (7, 8):
        loss = expected(**make_batch(step), use_cache=False).loss
        losses.append(float(loss.detach()))
        loss.backward()
        values = [each for each in expected.parameters() if each.requires_grad]
        norms.append(float(torch.nn.utils.clip_grad_norm_(values, math.inf)))
        with torch.no_grad():
            for value in values:
                value -= 0.1 * value.grad
                value.grad = None
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32
        ) as model,
    ):
        free = FinetuningOptions(learning_rate=0.1, max_grad_norm=None, max_tokens=40)
        for begun in (tmp_path / "begun", tmp_path / "again"):
            with model.finetuning_session(
                begun, optimizer=OptimizerConfig("sgd"), options=free
            ) as session:
                session.save_pretrained(tmp_path / "again")
                results = [session.step(make_batch(step)) for step in (7, 8)]
            assert [each.loss for each in results] == pytest.approx(losses, rel=1e-5)
            assert [each.grad_norm for each in results] == pytest.approx(norms, rel=1e-5)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match="empty has no adapter to go on with"):
            model.finetuning_session(tmp_path / "empty")
        config = tmp_path / "again" / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
        with pytest.raises(ConfigError, match=r"does not fit this model: .*\(5, "):
            model.finetuning_session(tmp_path / "again")
