"""What `generate` and `chat` take from a file or the environment, and what they do not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.flags import SamplingFlags
from tests.cli.test_app import PEER


@pytest.mark.parametrize(
    "key", [*(field.name for field in fields(SamplingFlags)), "max_length", "system", "top-p"]
)
def test_a_key_that_is_only_a_flag_is_told_as_one(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"{key} = 1\n", encoding="utf-8")
    flag = "--" + key.replace("_", "-")
    assert run_command(["chat", "m", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: unknown key {key!r}: it is a flag of ")
    assert said.endswith(f"chat; give {flag}\n")
    monkeypatch.setenv(f"NESA_{key.upper()}", "1")
    assert run_command(["chat", "m"]) == 2
    assert f"variable NESA_{key.upper()}: it is a flag of" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_limit_for_gateways_is_told_to_be_no_limit_here(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("max_new_tokens = 3\nlisten = '127.0.0.1:8000'\n", encoding="utf-8")
    argv = [command, "./none", *(["hello"] if command == "generate" else [])]
    argv += ["--initial-peers", PEER]
    assert run_command([*argv, "--config", str(path)]) == 3
    said = capsys.readouterr().err
    assert said.startswith(
        f"warning: max_new_tokens (from {path}) limits the answers of gateways only; here give "
        "--max-new-tokens\n"
    )
    assert said.count("warning") == 1
    assert run_command([*argv, "--config", str(path), "--max-new-tokens", "3"]) == 3
    assert "warning" not in capsys.readouterr().err
    monkeypatch.setenv("NESA_MAX_NEW_TOKENS", "3")
    assert run_command(argv) == 3
    assert "from the environment (NESA_MAX_NEW_TOKENS)" in capsys.readouterr().err


def test_help_says_that_sampling_is_no_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["generate", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "any of these settings, except those of prompts and sampling" in said
