"""`nesa-node deploy`: a model on members of this process, from flags to an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.cli.app import run_command
from tests.cli.tiny import write_tiny_model
from tests.deployments import shard_members

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def test_a_model_is_deployed_asked_changed_and_withdrawn(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    flags = ["--identity-path", str(tmp_path / "owner.key")]
    with shard_members(tmp_path, 2) as members:
        placing = ["--to", ",".join(members), "--splits", "1", "--cache-tokens", "256"]
        assert run_command(["deploy", str(model), *placing, *flags]) == 0
        said = capsys.readouterr().out
        assert "blocks, " in said
        (file,) = (tmp_path / "state" / "nesa-node" / "deployments").glob("*.json")
        assert str(file) in said
        asking = ["generate", str(model), "hello", "--max-new-tokens", "3"]
        assert run_command([*asking, "--deployment", str(file)]) == 0
        assert run_command(["deploy", str(model), "--rotate", *flags]) == 0
        assert "has a new id" in capsys.readouterr().out
        assert run_command(["deploy", str(model), "--move", *flags]) == 0
        assert "blocks, " in capsys.readouterr().out
        assert run_command([*asking, "--deployment", str(file)]) == 0
        assert run_command(["deploy", str(model), *placing, *flags]) == 2
        assert "--withdraw ends it" in capsys.readouterr().err
        assert run_command(["deploy", str(model), "--withdraw", *flags]) == 0
        assert not file.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--to is required"),
        (["--to", "127.0.0.1"], "127.0.0.1"),
        (["--rotate", "--move"], "leave out the other flags"),
        (["--to", "127.0.0.1:1", "--withdraw"], "leave out the other flags"),
        (["--to", "127.0.0.1:1", "--client-blocks", "1"], "two numbers"),
        (["--to", "127.0.0.1:1", "--splits", "0"], "at least 1"),
        (["--to", "127.0.0.1:1"], "Connection refused"),
        (["--rotate"], "there is no deployment"),
    ],
)
def test_mistakes_are_told(
    flags: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = ["--identity-path", str(tmp_path / "owner.key")]
    assert run_command(["deploy", str(model), *flags, *own]) != 0
    assert message in capsys.readouterr().err
