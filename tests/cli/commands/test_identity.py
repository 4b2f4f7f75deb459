"""`nesa-node identity`: the peer id is known before the daemon runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.cli.app import run_command
from nesa_node.swarm.p2p.identity import Identity


def test_identity_makes_a_key_once_and_tells_its_peer_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "identity.key"
    assert run_command(["identity", "--identity-path", str(path)]) == 0
    told = capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    assert run_command(["identity", "--identity-path", str(path)]) == 0
    assert capsys.readouterr().out == told == f"{Identity.load_or_create(path).peer_id}\n"


def test_a_key_that_others_can_read_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    assert run_command(["identity", "--identity-path", str(path)]) == 5
    assert "chmod 600" in capsys.readouterr().err
