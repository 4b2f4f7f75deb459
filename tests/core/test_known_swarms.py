from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.known_swarms import KnownSwarmStore

HERE = ("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",)
THERE = ("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",)


def test_nothing_is_known_at_first(tmp_path: Path) -> None:
    assert KnownSwarmStore(tmp_path / "none").find() is None


def test_the_last_swarm_is_remembered(tmp_path: Path) -> None:
    known = KnownSwarmStore(tmp_path / "swarms")
    known.save_last(HERE, "m@1")
    known.save_last(THERE, "m@2")
    found = known.find()
    assert found is not None
    assert (found.addresses, found.model, found.source) == (THERE, "m@2", "last")


def test_a_running_node_comes_before_the_last_swarm(tmp_path: Path) -> None:
    known = KnownSwarmStore(tmp_path)
    known.save_last(THERE, "m@2")
    with known.register_node(HERE, "m@1", "one"):
        found = known.find()
        assert found is not None
        assert (found.addresses, found.name, found.source) == (HERE, "one", "running")
    found = known.find()
    assert found is not None
    assert found.source == "last"


def test_a_node_of_this_machine_does_not_displace_the_last_swarm(tmp_path: Path) -> None:
    known = KnownSwarmStore(tmp_path)
    known.save_last(THERE, "m@2")
    with known.register_node(HERE, "m@1", "one"):
        known.save_last(HERE, None)
    found = known.find()
    assert found is not None
    assert (found.addresses, found.model) == (THERE, "m@2")


def test_a_command_without_a_model_keeps_the_one_that_the_swarm_is_known_by(tmp_path: Path) -> None:
    known = KnownSwarmStore(tmp_path)
    known.save_last(THERE, "m@2")
    known.save_last(THERE, None)
    found = known.find("m")
    assert found is not None
    assert found.model == "m@2"
    known.save_last(HERE, None)
    found = known.find()
    assert found is not None
    assert found.model is None


def test_the_swarm_of_the_model_asked_for_is_preferred(tmp_path: Path) -> None:
    known = KnownSwarmStore(tmp_path)
    known.save_last(THERE, "wanted@2")
    with known.register_node(HERE, "other@1", None):
        for wanted in ("wanted", "models/wanted", "org/wanted", "wanted@2"):
            found = known.find(wanted)
            assert found is not None
            assert found.addresses == THERE
        found = known.find("third")
        assert found is not None
        assert found.addresses == HERE


def test_a_folder_is_known_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownSwarmStore(tmp_path)
    known.save_last(THERE, "wanted@2")
    (tmp_path / "wanted").mkdir()
    monkeypatch.chdir(tmp_path / "wanted")
    with known.register_node(HERE, "other@1", None):
        found = known.find(".")
        assert found is not None
        assert found.addresses == THERE


def test_a_killed_node_is_forgotten(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from nesa_node.core.known_swarms import KnownSwarmStore;"
        "known = KnownSwarmStore(Path(sys.argv[1]));"
        "context = known.register_node(['/ip4/127.0.0.1/tcp/1'], 'm', None); context.__enter__();"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert len(list((tmp_path / "nodes").iterdir())) == 1
    assert KnownSwarmStore(tmp_path).find() is None
    assert not list((tmp_path / "nodes").iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", "[" * 60_000, "9" * 5000])
def test_a_damaged_file_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "last-swarm.json").write_text(text, encoding="utf-8")
    assert KnownSwarmStore(tmp_path).find() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"addresses": []},
        {"addresses": ["x"]},
        {"addresses": "x"},
        {"addresses": [*THERE, "/ip4/192.0.2.7/tcp/99999"]},
        {"saved_at": 1e30},
        {"saved_at": float("nan")},
        {"saved_at": -1e12},
        {"saved_at": 10**400},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_file_with_a_wrong_field_says_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    right = {"addresses": THERE, "model": None, "name": None, "saved_at": 1}
    path = tmp_path / "last-swarm.json"
    path.write_text(json.dumps(right), encoding="utf-8")
    assert KnownSwarmStore(tmp_path).find() is not None
    path.write_text(json.dumps(right | wrong), encoding="utf-8")
    assert KnownSwarmStore(tmp_path).find() is None


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    KnownSwarmStore(tmp_path).save_last(HERE, "m" * 70_000)
    assert KnownSwarmStore(tmp_path).find() is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text(json.dumps(1), encoding="utf-8")
    known = KnownSwarmStore(blocked)
    known.save_last(HERE, "m")
    with known.register_node(HERE, "m", None):
        pass


def test_of_several_nodes_of_this_machine_the_newest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KnownSwarmStore(tmp_path)
    with ExitStack() as stack:
        for number, addresses in enumerate((HERE, THERE)):
            with monkeypatch.context() as patched:
                # Each runs in a process of its own.
                patched.setattr("nesa_node.core.known_swarms.os.getpid", lambda pid=number: pid)
                patched.setattr("nesa_node.core.known_swarms.time.time", lambda at=number: at)
                stack.enter_context(known.register_node(addresses, "m@1", None))
        found = known.find()
        assert found is not None
        assert found.addresses == THERE
