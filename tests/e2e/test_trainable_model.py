"""PyTorch loops and transformers' Trainer on a swarm's model, against PEFT in one process.

R rows, L tokens of each, N positions that are learned, V vocabulary.
"""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.adapter_folder import WEIGHTS_NAME
from nesa_node.client.training.finetuning_session import FinetuningOptions, FinetuningSession
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.engine.training.adapters import OptimizerConfig
from tests.cli.tiny import write_tiny_model
from tests.e2e.test_finetuning import CONFIG, MAX_NORM, PROMPT, RATE, SEED, make_batch, prompt_of
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS, reference
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, remove_dropout
from tests.faults.test_finetuning import assert_same_adapter, kill_one
from tests.faults.test_finetuning import open_session as open_session_with_dropout
from tests.swarms import daemons, in_process_swarm, thirds

pytestmark = PEFT_WARNINGS
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 5
# With 1e-8 the rounding of a tiny gradient becomes a step of its own.
OPTIMIZER = OptimizerConfig(eps=1e-6)


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remove_dropout(tiny("llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with in_process_swarm(folder, thirds(BLOCKS), tmp_path_factory.mktemp("nodes")) as found:
        yield found


@contextmanager
def open_session(
    folder: Path,
    addresses: tuple[str, ...],
    *,
    client_blocks: tuple[int, int] = (0, 0),
    config: Any = CONFIG,
    **options: Any,
) -> Iterator[FinetuningSession]:
    # Two rows of `make_batch` fit into a micro-batch.
    wanted = {"learning_rate": RATE, "max_grad_norm": MAX_NORM, "max_tokens": 40} | options
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, client_blocks=client_blocks
        ) as model,
        model.finetuning_session(
            config, optimizer=OPTIMIZER, seed=SEED, options=FinetuningOptions(**wanted)
        ) as session,
    ):
        yield session


def make_reference(folder: Path, config: Any = CONFIG) -> Any:
    torch.manual_seed(SEED)
    model: Any = peft.get_peft_model(reference(folder).float(), copy.deepcopy(config))
    model.train()
    return model


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(parameters, lr=RATE, eps=OPTIMIZER.eps, weight_decay=0.0)


def compute_loss(model: Any, number: int) -> Tensor:
    """A loss of the caller's own: smoothed labels, and a penalty for large normalizers."""
    batch = make_batch(number)
    labels_RL = batch.pop("labels")[:, 1:]
    logits_RLV = model(**batch, use_cache=False).logits[:, :-1]
    chosen = labels_RL != -100
    logits_NV: Tensor = logits_RLV[chosen]
    loss = functional.cross_entropy(logits_NV, labels_RL[chosen], label_smoothing=0.1)
    return loss + 1e-3 * logits_NV.logsumexp(-1).square().mean()


def train_apart(model: Any, step: int) -> float:
    """Accumulate the gradients of two batches."""
    total = 0.0
    for number in (2 * step, 2 * step + 1):
        loss = compute_loss(model, number) / 2
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def train_together(model: Any, step: int) -> float:
    """One loss of two batches, whose graphs go backward in the reverse order."""
    compute_loss(model, 999)  # evaluated in train mode: its graph never goes backward
    loss = (compute_loss(model, 2 * step) + compute_loss(model, 2 * step + 1)) / 2
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def run_loop(
    model: Any, optimizer: torch.optim.Optimizer, train: Callable[[Any, int], float]
) -> list[float]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    losses = []
    for step in range(STEPS):
        losses.append(train(model, step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def assert_adapters_equal(folder: Path, expected: Any) -> None:
    found = load_file(folder / WEIGHTS_NAME)
    theirs = {
        name.replace(".default", ""): value.detach()
        for name, value in expected.named_parameters()
        if value.requires_grad
    }
    assert found.keys() == theirs.keys()
    for name, value in found.items():
        assert distance(value, theirs[name]) <= 1e-4, name


@pytest.mark.parametrize(("max_kept_tokens", "client_blocks"), [(None, (0, 0)), (120, (1, 1))])
@pytest.mark.parametrize("train", [train_apart, train_together])
def test_a_loop_with_a_loss_of_its_own_equals_one_process(
    train: Callable[[Any, int], float],
    max_kept_tokens: int | None,
    client_blocks: tuple[int, int],
    folder: Path,
    addresses: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Nodes have room for the passes of two batches, or of five."""
    expected = make_reference(folder)
    losses = run_loop(expected, make_optimizer(expected), train)
    with open_session(
        folder, addresses, max_kept_tokens=max_kept_tokens, client_blocks=client_blocks
    ) as session:
        found = run_loop(session.model, session.optimizer, train)
        assert session.applied == STEPS
        assert session.chain.recoveries == 0
        session.model.save_pretrained(tmp_path / "adapter")
    assert found == pytest.approx(losses, rel=1e-5)
    assert_adapters_equal(tmp_path / "adapter", expected)


@pytest.mark.parametrize("client_blocks", [(0, 0), (1, 1)])
def test_a_loop_over_a_shallow_prompt_equals_one_process(
    client_blocks: tuple[int, int], folder: Path, addresses: tuple[str, ...], tmp_path: Path
) -> None:
    """Logits are those of the virtual tokens, too, as PEFT's are."""

    def train(model: Any, number: int) -> float:
        output = model(**make_batch(number), use_cache=False)
        loss = output.loss + 1e-3 * output.logits[:, : PROMPT.num_virtual_tokens].square().mean()
        loss.backward()
        return float(loss.detach())

    expected = make_reference(folder, PROMPT)
    losses = run_loop(expected, make_optimizer(expected), train)
    with open_session(
        folder, addresses, config=PROMPT, client_blocks=client_blocks, max_tokens=50
    ) as session:
        found = run_loop(session.model, session.optimizer, train)
        assert session.applied == STEPS
        session.model.save_pretrained(tmp_path / "adapter")
        session.model.eval()
        output, batch = session.model(**make_batch(99)), make_batch(99)
        places_1L = torch.arange(20)[None] % 10
        with pytest.raises(UnsupportedFeatureError, match="a prompt comes before each row"):
            session.model(batch["input_ids"], position_ids=places_1L)
    assert found == pytest.approx(losses, rel=1e-5)
    [prompt_PD] = load_file(tmp_path / "adapter" / WEIGHTS_NAME).values()
    assert distance(prompt_PD, prompt_of(expected)) <= 1e-4
    expected.eval()
    with torch.no_grad():
        wanted = expected(**batch)
    assert float(output.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
    assert output.logits.shape == wanted.logits.shape
    assert distance(output.logits[0], wanted.logits[0]) <= 1e-5


def make_dataset() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(8, 20, (24,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(3, 300, (length,), generator=generator)} for length in lengths
    ]


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad at the right. The first two tokens of a text are not learned."""
    ids = [each["input_ids"] for each in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(ids, batch_first=True, padding_value=-100)
    labels[:, :2] = -100
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": labels,
    }


class NormRecorder(TrainerCallback):
    """Reads the norm that a session's optimizer knows."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        optimizer = rest["optimizer"].optimizer  # within accelerate's
        self.norms.append(optimizer.grad_norm)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    make: Any = get_linear_schedule_with_warmup
    schedule: torch.optim.lr_scheduler.LambdaLR = make(optimizer, 2, 8)
    return schedule


def run_trainer(
    model: Any, optimizer: torch.optim.Optimizer, folder: Path, **options: Any
) -> Trainer:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            max_grad_norm=MAX_NORM,
            eval_strategy="epoch",
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            seed=11,
            dataloader_pin_memory=False,
        ),
        train_dataset=make_dataset(),
        eval_dataset=make_dataset()[:5],
        data_collator=collate,
        optimizers=(optimizer, make_schedule(optimizer)),
        **options,
    )
    trainer.train()
    return trainer


def test_transformers_trainer_equals_one_process(
    folder: Path, addresses: tuple[str, ...], tmp_path: Path
) -> None:
    expected = make_reference(folder)
    theirs = run_trainer(expected, make_optimizer(expected), tmp_path / "theirs").state.log_history
    recorder = NormRecorder()
    with open_session(folder, addresses) as session:
        trainer = run_trainer(
            session.model, session.optimizer, tmp_path / "ours", callbacks=[recorder]
        )
        session.save_pretrained(tmp_path / "adapter")
    ours = trainer.state.log_history
    for name in ("loss", "eval_loss", "learning_rate", "train_loss"):
        found = [entry[name] for entry in ours if name in entry]
        assert found
        wanted = [entry[name] for entry in theirs if name in entry]
        assert found == pytest.approx(wanted, rel=1e-4), name
    norms = [entry["grad_norm"] for entry in theirs if "grad_norm" in entry]
    assert recorder.norms == pytest.approx(norms, rel=1e-4)
    assert_adapters_equal(tmp_path / "adapter", expected)


def test_label_smoothing_of_trainer_shifts_labels(
    folder: Path, addresses: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.1
    )
    with open_session(folder, addresses) as session, torch.no_grad():
        ours, theirs = (
            Trainer(model, arguments).compute_loss(model, dict(make_batch(0)))
            for model in (session.model, make_reference(folder))
        )
    assert isinstance(ours, Tensor)
    assert isinstance(theirs, Tensor)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_killed_between_forward_and_backward_changes_no_bit(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """With dropout."""
    folder, spans = tiny("llama"), thirds(BLOCKS)
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all([*spans, *spans])
        for name, strikes in (("plain", ()), ("disturbed", (2, 5))):
            with open_session_with_dropout(folder, nodes.addresses, None) as session:
                for step in range(STEPS + 2):
                    for number in (0, 1):
                        ids_RL = make_batch(2 * step + number)["input_ids"][:, :16]
                        loss = session.model(ids_RL, labels=ids_RL).loss
                        if number == 1 and step in strikes:
                            kill_one(nodes, session, hop=step % 2 + 1)
                        loss.backward()
                    session.optimizer.step()
                    session.optimizer.zero_grad()
                assert session.chain.recoveries == len(strikes)
                session.save_pretrained(tmp_path / name)
    assert_same_adapter(tmp_path / "disturbed", tmp_path / "plain")


def test_outputs_have_gradients_in_train_mode_only(
    folder: Path, addresses: tuple[str, ...]
) -> None:
    batch = make_batch(0)
    with open_session(folder, addresses, max_tokens=60) as session:
        model, plain = session.model, session.evaluate(batch)
        assert model.training
        assert model(**batch).loss.requires_grad
        model.eval()
        # Nodes keep nothing of these, however many they are.
        for _ in range(12):
            output = model(**batch)
        assert not output.loss.requires_grad
        assert not session.chain.num_backwards
        assert float(output.loss) == pytest.approx(plain, rel=1e-5)
        assert not output.logits[batch["attention_mask"] == 0].any()
        alone = reference(folder).float()
        with torch.no_grad():
            wanted = alone(**batch).logits[batch["attention_mask"] == 1]
        found = output.logits[batch["attention_mask"] == 1]
        assert distance(found, wanted) <= 1e-5
        loss, logits = model(**batch, return_dict=False)
        assert torch.equal(loss, output.loss)
        assert torch.equal(logits, output.logits)
        assert model(batch["input_ids"]).loss is None
        assert model.config.vocab_size == alone.config.vocab_size
        assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))


def test_gradients_are_forgotten_and_steps_without_any_do_nothing(
    folder: Path, addresses: tuple[str, ...], tmp_path: Path
) -> None:
    expected = make_reference(folder)
    optimizer = make_optimizer(expected)
    compute_loss(expected, 1).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(expected.parameters(), MAX_NORM)
    optimizer.step()
    with open_session(folder, addresses) as session:
        session.optimizer.step()
        compute_loss(session.model, 0)
        session.optimizer.step()
        assert session.applied == 0
        compute_loss(session.model, 0).backward()  # type: ignore[no-untyped-call]
        loss = compute_loss(session.model, 1)
        session.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        session.optimizer.step()
        session.model.zero_grad()
        assert session.applied == 1
        session.save_pretrained(tmp_path / "adapter")
    assert_adapters_equal(tmp_path / "adapter", expected)


def test_positions_that_begin_again_separate_texts(
    folder: Path, addresses: tuple[str, ...]
) -> None:
    batch = make_batch(3)
    lengths = [20, 13, 17]
    texts = [row[:n] for row, n in zip(batch["input_ids"], lengths, strict=True)]
    with open_session(folder, addresses, max_tokens=60) as session, torch.no_grad():
        apart = session.model(batch["input_ids"], batch["attention_mask"]).logits
        together = session.model(
            torch.cat(texts)[None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        ).logits
        found = torch.split(together[0], lengths)
        for ours, theirs, n in zip(found, apart, lengths, strict=True):
            assert distance(ours, theirs[:n]) <= 1e-5
        counted = session.model(batch["input_ids"], position_ids=torch.arange(20)[None]).logits
        plain = session.model(batch["input_ids"]).logits
        assert torch.equal(counted, plain)


def test_what_does_not_fit_is_refused_by_name(folder: Path, addresses: tuple[str, ...]) -> None:
    batch = make_batch(0)
    ids_RL, mask_RL = batch["input_ids"], batch["attention_mask"]
    with open_session(folder, addresses, max_kept_tokens=80) as session:
        model: Any = session.model
        for more, words in (
            ({"attention_mask": mask_RL.flip(1)}, "padding_side"),
            ({"attention_mask": mask_RL[:, 1:]}, r"attention_mask of shape \[3, 19\]"),
            ({"labels": ids_RL[:1]}, r"labels of shape \[1, 20\]"),
            ({"position_ids": torch.arange(20)[None] + 1}, "count its tokens"),
            ({"input_ids": torch.ones(1, 41).long()}, "at most 40"),
            ({"input_ids": torch.ones(5, 20).long()}, "max_kept_tokens"),
            ({"input_ids": torch.ones(5).long()}, "row of tokens"),
        ):
            with pytest.raises(ConfigError, match=words):
                model(**({"input_ids": ids_RL} | more))
        for name, value in (
            ("inputs_embeds", torch.zeros(1, 1, 64)),
            ("past_key_values", ()),
            ("use_cache", True),
            ("output_attentions", True),
            ("logits_to_keep", 1),
        ):
            with pytest.raises(UnsupportedFeatureError, match=name):
                model(ids_RL, **{name: value})
        with pytest.raises(TypeError, match="no_such_thing"):
            model(ids_RL, no_such_thing=1)
        with pytest.raises(UnsupportedFeatureError, match="save_pretrained"):
            model.state_dict()
        with pytest.raises(ConfigError, match="not finite"):
            (model(ids_RL, labels=ids_RL).loss * torch.inf).backward()
        late = model(**batch).loss
        model(**batch).loss.backward()
        session.optimizer.step()
        with pytest.raises(ConfigError, match="belongs to step 1"):
            late.backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(**batch).loss).backward()
        with pytest.raises(UnsupportedFeatureError, match="gradient scaler"):
            scaler.step(session.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["finetune.py", "finetune_with_trainer.py"])
def test_the_examples_of_the_readme_run(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("hello again\nthe capital w1 w2 w3\nw4 w5\n" * 3)
    monkeypatch.chdir(tmp_path)
    with in_process_swarm(model, thirds(4), tmp_path) as peers:
        monkeypatch.setattr(sys, "argv", [example, str(model), peers[0]])
        runpy.run_path(str(EXAMPLES / example))
    loaded = peft.PeftModel.from_pretrained(reference(model).float(), tmp_path / "adapter")
    changed = [value for name, value in loaded.named_parameters() if "lora_B" in name]
    assert changed
    assert all(bool(value.any()) for value in changed)
