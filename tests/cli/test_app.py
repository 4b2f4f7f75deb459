"""The command line without a swarm: flags, errors, exit codes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from nesa_node.cli import app as app_module
from nesa_node.cli.app import run_command
from nesa_node.cli.arguments import spread_addresses
from nesa_node.cli.flags import AccessFlags, ClientFlags, SharedFlags
from nesa_node.cli.peer_flags import NodeFlags, PeerFlags
from nesa_node.core.config import AccessConfig, ClientConfig, NodeConfig, PeerConfig, SharedConfig
from nesa_node.core.errors import MissingBlocksError, NesaError, UnsupportedFeatureError

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def nesa_node(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nesa_node", *argv],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        **more,
    )


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (SharedConfig, SharedFlags),
        (AccessConfig, AccessFlags),
        (ClientConfig, ClientFlags),
        (PeerConfig, PeerFlags),
        (NodeConfig, NodeFlags),
    ],
)
def test_every_setting_has_a_flag_and_every_flag_a_setting(
    config: type[SharedConfig], flags: type[SharedFlags]
) -> None:
    assert {field.name for field in fields(flags)} - {"config"} == set(config.model_fields) - {
        "model"
    }


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "bootstrap",
        "generate",
        "chat",
        "status",
        "doctor",
        "demo",
        "eval",
        "simulate",
        "keys",
    ],
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, "--help"]) == 0
    assert f"Usage: nesa-node {command}" in capsys.readouterr().out


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; from nesa_node.cli.app import run_command; run_command(['run', '--help']);"
        "print('HEAVY', {'torch', 'transformers', 'hivemind', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert "HEAVY set()" in done.stdout


def test_unknown_flag_is_one_line_with_the_nearest_flag_and_exit_code_2() -> None:
    done = nesa_node("run", "model", "--num-block", "3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: Unknown option: --num-block.")
    assert "--num-blocks" in done.stderr
    assert "nesa-node run --help" in done.stderr
    assert done.stderr.count("\n") == 1


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rum"]) == 2
    assert 'Did you mean "run"?' in capsys.readouterr().err


def test_typo_in_a_config_file_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "nesa.toml"
    path.write_text("num_block = 3\n", encoding="utf-8")
    done = nesa_node("run", "model", "--config", str(path))
    assert done.returncode == 2
    assert done.stderr == f"error: {path}: unknown key 'num_block'; did you mean 'num_blocks'?\n"


def test_typo_in_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NESA_NUM_BLOCK", "3")
    assert run_command(["run", "model"]) == 2
    assert "NESA_NUM_BLOCK; did you mean 'NESA_NUM_BLOCKS'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run"], "MODEL is required"),
        (["run", "m", "--threads", "x"], "threads = 'x' (from --threads)"),
        (["run", "m", "--initial-peers", "192.0.2.7"], "addresses like /ip4/"),
        (["run", "m", "--num-blocks", "2", "--block-indices", "0:2"], "exclude each other"),
        (["run", "m", "--torch-dtype", "int8"], "--torch-dtype"),
        (["run", "m", "--quant-type", "int4"], "--quant-type"),
        (["run", "m", "surplus"], "surplus"),
        (["generate"], "MODEL is required"),
        (["generate", "m", "hello"], "--initial-peers is required"),
        (["generate", "m", " ", "--initial-peers", PEER], "prompt is empty"),
        (["generate", "m", "p", "--temperature", "-1"], "--temperature"),
        (["generate", "m", "p", "--top-p", "2"], "--top-p"),
        (["chat", "m", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["demo", "--nodes", "0"], "--nodes"),
        (["status"], "--initial-peers is required"),
    ],
)
def test_wrong_arguments_end_with_code_2_and_one_clear_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert words in said


def test_wrong_model_name_ends_with_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "./no-such-folder", "hello", "--initial-peers", PEER]
    assert run_command(argv) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "no-such-folder" in said
    assert "Traceback" not in said


def test_addresses_after_one_flag_are_all_taken_and_a_prompt_is_not() -> None:
    given = ["generate", "m", "--initial-peers", PEER, PEER, "hello", "/ip4", "--seed", "1"]
    assert spread_addresses(given) == [
        *["generate", "m", "--initial-peers", PEER, "--initial-peers", PEER],
        *["hello", "/ip4", "--seed", "1"],
    ]


def test_a_repeated_flag_stays_as_it_is() -> None:
    given = ["--host-maddrs", "/ip4/0.0.0.0/tcp/1", "--host-maddrs", "/ip6/::/tcp/1"]
    assert spread_addresses(given) == given


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    broken = App(result_action="return_value", suppress_keyboard_interrupt=False)

    def fail() -> None:
        raise error

    broken.command(fail)
    monkeypatch.setattr(app_module, "app", broken)
    return run_command(["fail"])


def test_an_error_of_ours_gives_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails_with(UnsupportedFeatureError("no beam search"), monkeypatch) == 9
    assert capsys.readouterr().err == "error: no beam search\n"


def test_an_error_of_ours_inside_a_task_group_is_told_the_same_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = MissingBlocksError([(10, 20)], "nobody serves 10:20")
    group = BaseExceptionGroup("tasks", [ExceptionGroup("more", [inner])])
    assert fails_with(group, monkeypatch) == 6
    assert capsys.readouterr().err == "error: nobody serves 10:20\n"


def test_a_bug_beside_an_expected_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    group = BaseExceptionGroup("tasks", [NesaError("expected"), ZeroDivisionError()])
    with pytest.raises(BaseExceptionGroup):
        fails_with(group, monkeypatch)


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fails_with(KeyboardInterrupt(), monkeypatch) == 130


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m nesa_node run --help | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
