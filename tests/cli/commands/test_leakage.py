"""`nesa-node leakage` on a tiny model: swarms of this process, a table, a file, its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nesa_node.cli.app import run_command
from nesa_node.evaluation.leakage_claims import CLAIMS
from tests.cli.tiny import write_tiny_model
from tests.evaluation.models import random_text


@pytest.mark.timeout(300)
def test_each_mode_is_measured_and_the_page_is_made_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = write_tiny_model(tmp_path / "tiny")
    text, file = tmp_path / "text.txt", tmp_path / "rows.json"
    text.write_text(random_text(1200), encoding="utf-8")
    sizes = ["--training-tokens", "960", "--secret-tokens", "160", "--window", "40"]
    argv = ["leakage", str(model), "--text", str(text), *sizes, "--json", str(file)]
    assert run_command(argv) == 0
    said = capsys.readouterr()
    assert "tiny on" in said.out
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert {row["mode"] for row in rows} == set(CLAIMS)
    assert rows[0]["options"]["training"] == 960

    assert run_command(["leakage", "--page", str(file)]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# What nodes can learn of a prompt")
    assert all(claim.statement in page for claim in CLAIMS.values())
    for row in rows:
        assert row["setting"] in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window", "8"], "--window: at least 32"),
        (["--training-tokens", "20000"], "smaller --training-tokens"),
        (["--json", "/nowhere/rows.json"], "there is no folder /nowhere"),
        (["--page", "/nowhere/rows.json"], "has no results of nesa-node leakage"),
    ],
)
def test_mistakes_are_told(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text(random_text(500), encoding="utf-8")
    assert run_command(["leakage", str(model), "--text", str(text), *flags]) != 0
    assert message in capsys.readouterr().err
