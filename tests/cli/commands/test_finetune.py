"""`nesa-node finetune` over a real swarm of three nodes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nesa_node.cli.app import run_command
from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS
from tests.swarms import in_process_swarm, thirds

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def peer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("nodes")
    with in_process_swarm(model, thirds(BLOCKS), folder, cache_dir=folder / "cache") as addresses:
        yield addresses[0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    records = [
        {"prompt": f"hello w{at} the", "completion": f" capital w{at} again"} for at in range(40)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def finetune(model: Path, peer: str, data: Path, output: Path, *flags: str) -> int:
    given = {"--max-length": "64", "--learning-rate": "1e-2"}
    given = {name: value for name, value in given.items() if name not in flags}
    return run_command(
        [
            *("finetune", str(model), "--initial-peers", peer, "--data", str(data)),
            *("--output", str(output), "--dtype", "float32", "--micro-batches", "2"),
            *("--eval-every", "4", *(word for pair in given.items() for word in pair), *flags),
        ]
    )


def read_log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_a_file_becomes_an_adapter_that_peft_loads(
    model: Path, peer: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert finetune(model, peer, data, output, "--steps", "12") == 0
    told = capsys.readouterr()
    assert "adapter in" in told.out
    assert "done after 12 steps" in told.err
    assert "teach" not in told.err
    entries = read_log(output)
    assert [entry["step"] for entry in entries] == list(range(1, 13))
    assert entries[-1]["loss"] < 0.8 * entries[0]["loss"]
    checks = [entry["eval_loss"] for entry in entries if entry["eval_loss"] is not None]
    assert len(checks) == 3
    assert checks[-1] < checks[0]
    auto: Any = AutoModelForCausalLM
    loaded: Any = peft.PeftModel.from_pretrained(
        auto.from_pretrained(model, dtype=torch.float32), output
    )
    assert loaded.peft_config["default"].r == 8


def test_few_steps_are_pointed_out(
    model: Path, peer: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(model, peer, data, tmp_path / "out", "--epochs", "0.1") == 0
    assert "so few steps teach a model little: --steps 100" in capsys.readouterr().err


def test_the_weights_themselves_become_a_model(
    model: Path, peer: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    flags = ("--method", "full", "--learning-rate", "1e-3", "--steps", "6", "--tensorboard")
    assert finetune(model, peer, data, output, *flags) == 0
    assert f"model in {output} (serve it with nesa-node run" in capsys.readouterr().out
    entries = read_log(output)
    assert entries[-1]["loss"] < entries[0]["loss"]
    auto: Any = AutoModelForCausalLM
    before = auto.from_pretrained(model, dtype=torch.float32).state_dict()
    after = auto.from_pretrained(output).state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".layers." in name}
    assert AutoTokenizer.from_pretrained(output)("hello")["input_ids"]
    points = read_events(output / "tensorboard")
    assert points["loss"] == pytest.approx([entry["loss"] for entry in entries])
    assert points["learning_rate"] == pytest.approx([each["learning_rate"] for each in entries])
    assert len(points["validation_loss"]) == 2


def read_events(folder: Path) -> dict[str, list[float]]:
    """Values of all scalars, from the records of TensorBoard's event files."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[float]] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            length = int.from_bytes(data[:8], "little")
            for value in Event.FromString(data[12 : 12 + length]).summary.value:
                found.setdefault(value.tag, []).append(value.simple_value)
            data = data[16 + length :]
    return found


@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_a_shallow_prompt_begins_as_a_text(
    packing: str, model: Path, peer: str, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    flags = ("--method", "prompt", "--rank", "6", "--prompt-text", "the capital", packing)
    assert finetune(model, peer, data, output, *flags, "--steps", "12") == 0
    checks = [entry["eval_loss"] for entry in read_log(output) if entry["eval_loss"] is not None]
    assert checks[-1] < checks[0]
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(model, dtype=torch.float32)
    loaded: Any = peft.PeftModel.from_pretrained(base, output)
    prompt_PD = loaded.prompt_encoder["default"].embedding.weight.detach()
    text = loaded.peft_config["default"].prompt_tuning_init_text
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    begun_PD = base.get_input_embeddings().weight[ids * 3].detach()
    assert 0 < float((prompt_PD - begun_PD).abs().max()) < 12 * 1.1e-2


def test_the_same_command_continues_where_it_was(
    model: Path, peer: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ("--steps", "8", "--checkpoint-every", "3", "--schedule", "constant")
    assert finetune(model, peer, data, whole, *flags) == 0
    assert finetune(model, peer, data, parts, *flags) == 0
    assert "continued" not in capsys.readouterr().err
    assert finetune(model, peer, data, parts, *flags) == 0
    assert "continued after step 8" in capsys.readouterr().err
    assert len(read_log(parts)) == 8
    mine, theirs = (folder / "adapter_model.safetensors" for folder in (parts, whole))
    assert mine.read_bytes() == theirs.read_bytes()
    assert finetune(model, peer, data, parts, *flags, "--seed", "1") == 2
    assert "belongs to a session in which the adapters, optimizer or seed differed" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rank", "0"], "--rank must be at least 1"),
        (["--rank", "2000"], "nodes do not train such an adapter"),
        (["--dropout", "1"], "--dropout must lie in [0, 1)"),
        (["--steps", "2", "--epochs", "1"], "give one of them"),
        (["--target-modules", "nothing"], "PEFT refuses this adapter"),
        (["--max-length", "1000"], "the model holds 512 tokens"),
        (["--method", "prompt", "--max-length", "505"], "the model holds 504 tokens"),
        (["--method", "prompt", "--rank", "512"], "no room for a text after the prompt"),
        (["--prompt-text", "hello"], "--prompt-text needs --method prompt"),
        (["--learning-rate", "-1"], "learning_rate must be"),
        (["--validation-share", "2"], "between 0 and 1"),
    ],
)
def test_what_is_wrong_is_named(
    flags: list[str],
    words: str,
    model: Path,
    peer: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert finetune(model, peer, data, tmp_path / "out", *flags) != 0
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_data_and_output_are_required(
    model: Path, peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["finetune", str(model), "--initial-peers", peer]
    assert run_command(command) == 2
    assert "--data is required" in capsys.readouterr().err
    assert run_command([*command, "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "--output is required" in capsys.readouterr().err
    assert run_command([*command, "--data", "none.jsonl", "--output", str(tmp_path / "o")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_published_adapter_and_a_folder_are_trained_further(
    model: Path, peer: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first"
    assert finetune(model, peer, data, first, "--steps", "4") == 0
    access = ("--initial-peers", peer, "--identity-path", str(tmp_path / "key"))
    publish = ["adapters", "publish", str(model), str(first), "--name", "begun", *access]
    assert run_command(publish) == 0
    capsys.readouterr()
    assert run_command(["adapters", "list", str(model), "--initial-peers", peer, "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    last = read_log(first)[-1]
    assert listed["metrics"] == {"loss": last["loss"], "eval_loss": last["eval_loss"], "steps": 4}
    for name, initial in (("published", "begun"), ("folder", str(first))):
        further = ("--steps", "2", "--initial-adapter", initial)
        assert finetune(model, peer, data, tmp_path / name, *further) == 0
    after = [read_log(tmp_path / name) for name in ("first", "published", "folder")]
    assert [entry["loss"] for entry in after[1]] == [entry["loss"] for entry in after[2]]
    assert after[1][0]["loss"] < after[0][0]["loss"]
    capsys.readouterr()
    wrong = ("--initial-adapter", "begun", "--rank", "4")
    assert finetune(model, peer, data, tmp_path / "wrong", *wrong) == 2
    assert "has its own kind, rank and modules" in capsys.readouterr().err
    assert finetune(model, peer, data, tmp_path / "none", "--initial-adapter", "missing") != 0
    assert "no adapter 'missing' is published" in capsys.readouterr().err
