"""`nesa-node plan`: a network's pieces, and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import ViTConfig

from nesa_node.cli.app import run_command
from nesa_node.sharding.graph_plan import decode_plan
from tests.engine.tiny_pipelines import save_pipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vit")
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(folder)
    return str(folder)


FEW = ("--search-s", "1", "--tflops", "1e-4", "--link-mbit-per-s", "1000")


def test_a_plan_as_a_table(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawing = tmp_path / "plan.svg"
    assert run_command(["plan", model, "--nodes", "3", "--svg", str(drawing), *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1] == "operations,"
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "1"], ["2", "2"], ["3", "3"]]
    assert "no partition does better" in lines[5]
    assert drawing.read_text().count("machine") >= 3


def test_a_plan_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", model, "--json", *FEW]) == 0
    plan = json.loads(capsys.readouterr().out)
    pieces = plan["pieces"]
    assert sum(len(piece["operations"]) for piece in pieces) == plan["operations"]
    assert plan["bottleneck_s"] == max(piece["total_s"] for piece in pieces)
    assert plan["bound_s"] <= plan["bottleneck_s"] <= plan["kahn_s"]
    for piece in pieces:
        parts = (piece[f"{part}_s"] for part in ("receive", "work", "overflow", "send"))
        assert piece["total_s"] == pytest.approx(sum(parts))


def test_unequal_machines(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machines = tmp_path / "machines.toml"
    machines.write_text("[[machine]]\ntflops = 1e-4\n[[machine]]\ncount = 2\ntflops = 3e-4\n")
    arguments = ["--machines", str(machines), "--search-s", "2", "--json"]
    assert run_command(["plan", model, *arguments]) == 0
    pieces = json.loads(capsys.readouterr().out)["pieces"]
    assert sorted(piece["machine"] for piece in pieces) == [1, 2, 3]
    slow = next(piece for piece in pieces if piece["machine"] == 1)
    assert all(len(slow["operations"]) <= len(piece["operations"]) for piece in pieces)


def test_machines_further_apart(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machines = tmp_path / "machines.toml"
    rates = "tflops = 1e-4\nlink_mbit_per_s = 1000\n"
    machines.write_text(
        "".join(f'[[machine]]\nname = "{name}"\ncount = 2\n{rates}' for name in "ab")
        + '[[link]]\nbetween = ["a", "b"]\nmbit_per_s = 0.1\n'
    )
    arguments = ["--machines", str(machines), "--search-s", "3", "--json"]
    assert run_command(["plan", model, *arguments]) == 0
    pieces = json.loads(capsys.readouterr().out)["pieces"]
    assert {(piece["machine"], piece["name"]) for piece in pieces} == set(enumerate("aabb", 1))
    busy = {piece["machine"] for piece in pieces if piece["operations"]}
    assert busy in ({1, 2}, {3, 4})


@pytest.mark.timeout(180)
def test_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its denoiser, which runs for each step, has most of the machines."""
    save_pipeline("StableDiffusionPipeline", tmp_path)
    plan = tmp_path / "plan.json"
    assert run_command(["plan", str(tmp_path), "--nodes", "5", "--out", str(plan), *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "runs text_encoder once, unet 40 times, vae once" in lines[1]
    networks = [line.split()[3] for line in lines[3:8]]
    assert sorted(networks) == ["text_encoder", "unet", "unet", "unet", "vae"]
    assert len(decode_plan(plan.read_bytes(), where=str(plan)).pieces) == 5


def test_machines_that_only_slow_it_down(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    slow_links = ["--link-mbit-per-s", "0.001", "--search-s", "0.5"]
    assert run_command(["plan", model, "--nodes", "4", *slow_links]) == 0
    assert "3 machines have no piece" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--nodes", "0"], "count: Input should be greater than or equal to 1"),
        (["--tflops", "0"], "tflops: Input should be greater than 0"),
        (["--tflops", "nan"], "tflops"),
        (["--fast-memory-gb", "-1"], "fast_memory_gb"),
        (["--search-s", "0"], "--search-s 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--tokens", "0"], "--tokens 0"),
        (["--image-size", "0"], "--image-size 0"),
        (["--image-size", "33"], r"image size \(33\*33\)"),
        (["--svg", "plan.txt"], "must end in .svg"),
        (["--svg", "/nonexistent/plan.svg"], "there is no folder"),
        (["--machines", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_bad_input(
    model: str, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", model, *arguments]) != 0
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(what, error)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("machine = 3", "tables [[machine]]"),
        ("[[machines]]\ntflops = 1", "tables [[machine]]"),
        ("[[machine]]\nspeed = 1", "machine 1: speed"),
        ("[[machine]]\n[[machine]]\ncount = 0", "machine 2: count"),
        ("[[machine]", "--machines"),
        ("[[machine]]\ncount = 1000\n[[machine]]", "1001 machines: at most 1000"),
        ("[[link]]\nbetween = ['a', 'b']\nmbit_per_s = 1", "tables [[machine]]"),
        ("[[machine]]\n[[link]]\nbetween = ['a', '']\nmbit_per_s = 1", "link 1: no machine has"),
        ("[[machine]]\n[[link]]\nbetween = 'ab'\nmbit_per_s = 1", "two names of machines"),
        ("[[machine]]\n[[link]]\nbetween = ['ab']\nmbit_per_s = 1", "two names of machines"),
        (
            "[[machine]]\nname = 'a'\n[[link]]\nbetween = ['a', 'a']\nmbit_per_s = 1",
            "link 1: there is one machine 'a'",
        ),
        (
            "[[machine]]\nname = 'a'\n[[machine]]\nname = 'b'\n"
            "[[link]]\nbetween = ['a', 'b']\nmbit_per_s = 1\n"
            "[[link]]\nbetween = ['b', 'a']\nmbit_per_s = 5",
            "link 2: a link before it has the same pair",
        ),
        ("[[machine]]\nname = 'a'\n[[machine]]\nname = 'a'", "machine 2: another one has the name"),
        ("machine = []", "tables [[machine]]"),
        (
            "[[machine]]\nname = 'a'\n[[link]]\nbetween = ['a', 'a']\nmbit_per_s = 0",
            "link 1: mbit_per_s",
        ),
    ],
)
def test_bad_files_of_machines(
    model: str, text: str, what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machines = tmp_path / "machines.toml"
    machines.write_text(text)
    assert run_command(["plan", model, "--machines", str(machines)]) != 0
    assert what in capsys.readouterr().err
