"""What commands wait for is said while they do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.commands import demo
from nesa_node.cli.services.local_swarm import StartingNode, stop_processes, wait_until_serving
from nesa_node.cli.views import swarm as watching
from nesa_node.client.model import auto as client_model
from nesa_node.client.model import auto as opening
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.models import ClientConfig
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.engine.weights.hub import open_checkpoint
from tests.cli.tiny import write_tiny_model
from tests.cli.told import told_now


class Heard:
    """Takes the place of what takes long; remembers what is told then, and goes no further."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self.told += told_now()
        raise ConfigError("heard")


@pytest.mark.parametrize(
    ("argv", "work"),
    [
        (["--world", "nodes=5"], "nesa_node.cli.simulation_input.make_world_swarm"),
        (
            ["--world", "nodes=5"],
            "nesa_node.cli.simulation_input.SimulatedSwarm.apply_changes",
        ),
        (["--replay", "x"], "nesa_node.cli.simulation_input.replay_snapshots"),
    ],
    ids=["a world", "its planners", "a replay"],
)
def test_simulate_tells_of_its_planners(
    argv: list[str], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(work, heard)
    assert run_command(["simulate", *argv]) == 2
    assert len(heard.told) == 1
    assert heard.told[0].startswith("the planners")


@pytest.mark.parametrize(
    ("module", "work", "words"),
    [
        (opening, "load_tokenizer", "the tokenizer to be loaded"),
        (client_model, "load_embedder_and_head", "embedding and head to be loaded"),
    ],
    ids=["tokenizer", "ends"],
)
def test_a_client_tells_of_what_it_loads(
    module: Any, work: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(module, work, heard)
    checkpoint = open_checkpoint(str(write_tiny_model(tmp_path / "tiny")), cache_dir=tmp_path)
    with WaitTracker().activate(), pytest.raises(ConfigError, match="heard"):
        opening.open_model(ClientConfig(), checkpoint)
    assert heard.told == [words]


def test_the_demo_tells_of_daemons_that_start_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready.json"
    facts = {"peer_id": "p", "addresses": [], "span": [0, 1]}
    told: list[str] = []

    def look(_seconds: float) -> None:
        told.extend(told_now())
        ready.write_text(json.dumps(facts), encoding="utf-8")

    monkeypatch.setattr("nesa_node.cli.services.local_swarm.time.sleep", look)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        node = StartingNode("node-1", process, ready, tmp_path / "log", time.time(), ())
        with WaitTracker().activate():
            wait_until_serving(node, time.monotonic() + 60)
            ending: Any = SimpleNamespace(
                poll=lambda: 0, wait=lambda _seconds: told.extend(told_now())
            )
            stop_processes([ending])
        process.kill()
    assert told == ["node-1 to serve", "daemons to leave the swarm"]


def test_the_demo_tells_of_local_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr("nesa_node.engine.weights.tokenizer.load_tokenizer", heard)
    with WaitTracker().activate(), pytest.raises(ConfigError, match="heard"):
        demo._ask_transformers(tmp_path, ())
    assert heard.told == ["transformers' own answers in this process"]


async def test_a_look_at_the_swarm_is_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()

    class Joined:
        """A reader whose directory is silent."""

        def __init__(self, _config: ClientConfig) -> None:
            self.directory: Any = SimpleNamespace(dropped={}, fetch_all=heard)

        async def __aenter__(self) -> Joined:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(watching, "open_reader", Joined)
    with WaitTracker().activate(), pytest.raises(ConfigError, match="heard"):
        await watching.watch_swarm(ClientConfig(), 2.0, lambda _: None)
    assert heard.told == ["the DHT's records of all nodes"]
