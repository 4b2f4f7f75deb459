"""The commands against daemons that run."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.services.local_swarm import LocalNode, local_swarm
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import Span
from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.evaluation.models import random_text

FLAGS = ("--torch-dtype", "float32", "--device", "cpu", "--threads", "1")
NARROW = "int4:32:16"
ABSENT = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LocalNode]]:
    folder = tmp_path_factory.mktemp("swarm")
    with local_swarm(model, [Span(0, 3), Span(3, BLOCKS)], folder, flags=FLAGS) as running:
        yield running
    assert [node.process.returncode for node in running] == [0, 0]
    assert not list(folder.glob("*.json"))


@pytest.fixture
def join(nodes: list[LocalNode]) -> list[str]:
    return ["--initial-peers", *nodes[0].addresses]


def local_tokens(model: Path, text: str, count: int) -> str:
    """What local transformers answer to `text` under the chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    alone: Any = AutoModelForCausalLM.from_pretrained(model)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = alone.generate(**inputs, max_new_tokens=count, do_sample=False)
    decoded = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(decoded)


def test_status_shows_nodes_and_coverage(
    join: list[str], nodes: list[LocalNode], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["status", *join]) == 0
    shown = capsys.readouterr().out
    assert "tiny@" in shown
    assert "2 nodes" in shown
    for node in nodes:
        assert node.name in shown
        assert node.peer_id[-6:] in shown
        assert str(node.span) in shown
    assert "coverage  0 1111 4" in shown
    assert "holes     none" in shown


def test_status_as_json_is_for_programs(
    join: list[str], nodes: list[LocalNode], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["status", "tiny", "--json", *join]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["num_blocks"] == BLOCKS
    assert told["coverage"] == [1] * BLOCKS
    assert told["holes"] == []
    assert {node["peer_id"] for node in told["nodes"]} == {node.peer_id for node in nodes}


def test_status_of_a_model_that_nobody_serves_says_so(
    join: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["status", "other", *join]) == 0
    assert "no node serves 'other'; the swarm serves tiny@" in capsys.readouterr().out
    assert run_command(["status", "other", *join, "--json"]) == 0
    said = capsys.readouterr()
    assert said.out == "[]\n"
    assert "no node serves 'other'" in said.err


@pytest.mark.parametrize("route", ["chain", "star"])
def test_generate_streams_what_transformers_answers(
    model: Path, join: list[str], route: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", str(model), *join, "hello", "--max-new-tokens", "12", "--route", route]
    assert run_command([*argv, "--dtype", "float32"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == local_tokens(model, "hello", 12).split()
    assert "tokens/s" in said.err
    assert " 0:3 → " in said.err


def test_explain_says_why_a_session_got_its_nodes(
    model: Path,
    join: list[str],
    nodes: list[LocalNode],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_command(["explain"]) == 0
    assert "no decision was logged" in capsys.readouterr().out
    argv = ["generate", str(model), *join, "hello", "--max-new-tokens", "4", "--dtype", "float32"]
    assert run_command(argv) == 0
    capsys.readouterr()
    assert run_command(["explain", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)
    # Newcomers' hops are audited at times, and audits are decisions too.
    (told,) = [one for one in decisions if one["kind"] == "session"]
    assert [visit["peer"] for visit in told["chain"]] == [node.peer_id for node in nodes]
    assert told["strategy"] == "exact-latency"
    assert told["cost"] == pytest.approx(sum(told["terms"].values()))
    lost_s = told["terms"]["failures_s"]
    assert told["cost"] == pytest.approx(sum(told["step_s"].values()) + lost_s)
    assert [other["without"] for other in told["alternatives"]] == [n.peer_id for n in nodes]
    assert all(other["chain"] is None for other in told["alternatives"])
    assert run_command(["explain", told["name"][:8]]) == 0
    shown = capsys.readouterr().out
    assert "a step was expected to take" in shown
    assert "no other chain" in shown
    assert all(node.peer_id[-6:] in shown for node in nodes)
    assert run_command(["explain", "ffffffffffffffff"]) == 2
    assert "no decision about" in capsys.readouterr().err


def test_eval_measures_a_live_swarm_as_it_measures_the_model_here(
    model: Path, join: list[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(random_text(2000), encoding="utf-8")
    told = []
    for where in ([*join, "--wire", f"none,{NARROW}"], ["--weights", "none", "--wire", "none"]):
        table = tmp_path / "table.json"
        argv = ["eval", str(model), *where, "--text", str(text), "--json", str(table)]
        argv += ["--tokens", "300", "--context", "64", "--items", "12", "--dtype", "float32"]
        assert run_command(argv) == 0
        told += json.loads(table.read_text(encoding="utf-8"))
    swarm, narrow, here = told
    assert swarm["weights"] == "as served"
    assert swarm["perplexity"]["value"] == pytest.approx(here["perplexity"]["value"], rel=1e-4)
    assert swarm["acc_norm"]["right"] == here["acc_norm"]["right"]
    assert narrow["wire"] == NARROW
    assert 1e-3 < abs(narrow["perplexity"]["change"]) < 1


def test_sampling_with_a_seed_repeats_itself(
    model: Path, join: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        argv = ["generate", str(model), "hello", *join, "--temperature", "2", "--seed", seed]
        assert run_command([*argv, "--max-new-tokens", "12"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_chat_answers_each_piped_line_and_knows_its_commands(
    model: Path,
    join: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys,
        "stdin",
        io.StringIO("hello\n/reset\nhello\n\n/stats\n/nonsense\n /help \n/exit \nhello\n"),
    )
    assert run_command(["chat", str(model), *join, "--max-new-tokens", "8"]) == 0
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert first == second
    assert first.split() == local_tokens(model, "hello", 8).split()
    assert "tokens/s" in said.err
    assert "unknown command /nonsense" in said.err
    assert "unknown command /exit" not in said.err
    assert said.err.splitlines()[-1].startswith("/help shows this, /reset starts over")


def test_a_second_turn_sends_only_what_is_new(
    model: Path,
    join: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n/stats\n/exit\n"))
    assert run_command(["chat", str(model), *join, "--max-new-tokens", "8"]) == 0
    words = capsys.readouterr().err.split()
    context = int(words[words.index("tokens") - 1])
    sent = int(words[words.index("sent") - 1])
    assert sent < context + 8


def test_doctor_reaches_the_swarm_and_measures_the_model(
    model: Path, join: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["doctor", str(model), *join]) == 0
    shown = capsys.readouterr().out
    assert "connected in" in shown
    assert "2 nodes announced" in shown
    assert "agrees with the swarm's records" in shown
    assert f"{BLOCKS} of {BLOCKS} blocks of tiny would fit on cpu" in shown
    assert "fail" not in shown


def test_the_example_of_the_readme_runs(model: Path, nodes: list[LocalNode]) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "generate.py"
    done = subprocess.run(
        [sys.executable, str(example), str(model), nodes[0].addresses[0]],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


def test_a_busy_port_ends_a_daemon_with_code_5(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "nesa_node"),
                *daemon_arguments(model, tmp_path, "--host-maddrs", address),
            ],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert done.returncode == 5
    assert f"port {port} is in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_ends_a_daemon_with_code_4(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = daemon_arguments(model, tmp_path, "--attn-cache-tokens", "1000000000000")
    assert run_command(argv) == 4
    said = capsys.readouterr().err
    assert "MiB" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_blocks_that_the_model_lacks_end_a_daemon_with_code_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(daemon_arguments(model, tmp_path, "--block-indices", "2:9")) == 2
    said = capsys.readouterr().err
    assert "2:9" in said
    assert "0:4" in said


@pytest.mark.slow
def test_a_missing_peer_ends_commands_with_code_5(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["status", "--initial-peers", ABSENT]) == 5
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: none of the initial peers answered")
    assert ABSENT in said


@pytest.mark.slow
def test_doctor_fails_for_a_missing_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--initial-peers", ABSENT]) == 1
    assert f"fail peer         {ABSENT}" in capsys.readouterr().out


def test_a_daemon_that_does_not_come_up_is_reported_with_its_words(
    model: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(SwarmError, match=r"node-1 ended with exit code 2[\s\S]*0:4"),
        local_swarm(model, [Span(0, 9)], tmp_path, flags=FLAGS),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_with_a_small_model_finds_equal_tokens(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nesa_node", "demo", str(model), "--timed-tokens", "16"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens equal local transformers: yes" in done.stdout
    # node-4 holds the blocks of one of the others.
    assert re.search(r"node-\d 0:1 → node-\d 1:2 → node-\d 2:4", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_no_daemon(
    model: Path, number: signal.Signals, code: int
) -> None:
    """The harness looks for what is left."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "nesa_node", "demo", str(model), "--timed-tokens", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert demo.stdout is not None
    with demo.stdout:
        for line in demo.stdout:
            if "coverage" in line:
                break
        demo.send_signal(number)
        assert demo.wait(60) == code


def daemon_arguments(model: Path, tmp_path: Path, *flags: str) -> list[str]:
    """Of a daemon that is expected not to come up."""
    return ["run", str(model), *FLAGS, *flags, "--identity-path", str(tmp_path / "key")]
