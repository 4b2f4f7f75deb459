"""`nesa-node eval` on a tiny model, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.commands.eval import _measure_cells, limit_parts
from nesa_node.core.known_swarms import KnownSwarmStore
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.evaluation.results import Cell
from tests.cli.tiny import write_tiny_model
from tests.evaluation.models import random_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(random_text(3000), encoding="utf-8")
    return file


SMALL = ["--tokens", "400", "--context", "64", "--items", "20"]


def test_eval_shows_each_combination_and_writes_it(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    argv = ["eval", str(model), "--text", str(text), *SMALL, "--json", str(table)]
    assert run_command([*argv, "--weights", "int8,none", "--wire", "none,blockwise8:64"]) == 0
    said = capsys.readouterr()
    assert said.err.count(" s\n") == 4
    assert "tiny on" in said.out
    for word in ("bfloat16", "int8", "blockwise8:64", "perplexity", "acc_norm"):
        assert word in said.out
    rows = json.loads(table.read_text(encoding="utf-8"))
    assert [(row["weights"], row["wire"]) for row in rows] == [
        ("none", "none"),
        ("none", "blockwise8:64"),
        ("int8", "none"),
        ("int8", "blockwise8:64"),
    ]
    assert rows[0]["perplexity"]["change"] == 0
    assert rows[0]["perplexity"]["p_value"] == 1
    assert rows[0]["options"]["dtype"] == "bfloat16"
    assert len(rows[3]["acc"]["right"]) == 20
    assert rows[3]["perplexity"]["tokens"] == 399


def test_what_is_measured_is_a_wait_that_can_be_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, told = WaitTracker(), []

    def measure(*_: object) -> Iterator[Any]:
        for name in ("a", "b"):
            wait = waits.slow_wait(after_s=0)
            told.append(None if wait is None else wait.what)
            yield SimpleNamespace(cell=name, seconds=30.0)

    monkeypatch.setattr("nesa_node.evaluation.results.measure_cells", measure)
    nothing: Any = None
    with waits.activate():
        _measure_cells(nothing, nothing, [Cell("none", "none"), Cell("int8", "none")], nothing)
    assert told == [
        "combination 1 of 2 (weights none, wire none)",
        "combination 2 of 2 (weights int8, wire none)",
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "2 combinations are measured, one after another"
    assert said[1:] == ["1/2 a: 30 s", "2/2 b: 30 s"]


def test_the_same_seed_gives_the_same_table(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", str(model), "--text", str(text), *SMALL, "--weights", "none", "--wire", "none"]
    told = []
    for seed in ("1", "1", "2"):
        assert run_command([*argv, "--seed", seed, "--dtype", "float32"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert told[0] != told[2]


def test_choices_of_a_file_need_no_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "items.jsonl"
    lines = [
        {"context": random_text(9, seed=seed), "endings": ["w1 w2", "hello w3 w4"], "label": 0}
        for seed in range(6)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    argv = ["eval", str(model), "--choices", str(file), "--tokens", "0", "--items", "5"]
    assert run_command([*argv, "--weights", "none", "--wire", "none"]) == 0
    said = capsys.readouterr().out
    assert "5 items of multiple choice" in said
    assert "perplexity" not in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--weights", "int9"], "--weights int9: choose among none, int8, nf4"),
        (["--weights", "int8,,nf4"], "names separated by commas"),
        (["--wire", "gzip"], "--wire gzip: unknown codec"),
        (["--text", "no-such-file"], "--text no-such-file: no such file"),
        (["--tokens", "100"], "--tokens 100: at least 129"),
        (["--tokens", "-1"], "must not be negative"),
        (["--tokens", "0", "--items", "0"], "nothing to measure"),
        (["--items", "1"], "--items 1: at least 2"),
        (["--choices", "no-such-file"], "--choices no-such-file: cannot be read"),
        (["--stride", "64"], "--stride 64 must be at least 1 and below --context 64"),
        (["--context", "0"], "--context 0: at least 2"),
        (["--nodes", "0"], "--nodes must be positive"),
        (["--task-limit", "1"], "--task-limit 1"),
        (["--tasks", "hellaswag", "--task-folder", "none"], "--task-folder none: no such folder"),
        (["--json", "no/such/folder.json"], "there is no folder no/such"),
    ],
)
def test_wrong_arguments_end_with_code_2_before_anything_runs(
    model: Path,
    text: Path,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = {"--text": str(text), "--tokens": "400", "--context": "64", "--items": "20"}
    rest = [word for flag, value in usual.items() if flag not in argv for word in (flag, value)]
    assert run_command(["eval", str(model), *rest, *argv]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert said.out == ""


def test_more_parts_than_blocks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert limit_parts(4, 4) == 4
    assert capsys.readouterr().err == ""
    assert limit_parts(40, 4) == 4
    assert "--nodes 40: the model has 4 blocks, so they run in 4" in capsys.readouterr().err


def test_weights_of_a_live_swarm_cannot_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    peer = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    assert run_command(["eval", "m", "--weights", "int8", "--initial-peers", peer]) == 2
    assert "of a live swarm choose their weights" in capsys.readouterr().err


def test_a_live_swarm_is_looked_for_as_by_other_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_command(["eval", "m", "--live"]) == 2
    assert "no swarm was used before" in capsys.readouterr().err
    known = KnownSwarmStore(tmp_path / "nesa-node" / "swarms")
    known.save_last(["/ip4/192.0.2.7/tcp/4001"], "m")
    assert run_command(["eval", "/no/such/m", "--live"]) == 3
    assert "using the last swarm of m, /ip4/192.0.2.7/tcp/4001" in capsys.readouterr().err


def test_a_short_text_is_measured_as_far_as_it_goes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text(random_text(200, seed=3), encoding="utf-8")
    argv = ["eval", str(model), "--text", str(short), "--weights", "none", "--wire", "none"]
    assert run_command([*argv, "--context", "64"]) == 0
    said = capsys.readouterr()
    assert "200 tokens in windows" in said.out
    assert "warning: the text has 200 tokens, 4096 are asked for: all are taken" in said.err
    assert "room for 5 items, 100 are asked for: 5 are taken" in said.err


def test_a_text_of_a_few_words_is_an_error_with_its_reason(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hello again", encoding="utf-8")
    assert run_command(["eval", str(model), "--text", str(short)]) == 2
    assert "too short to measure anything" in capsys.readouterr().err
