"""Commands that find the swarm by themselves, against a daemon that runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nesa_node.cli.app import run_command
from nesa_node.server.node.daemon import JOIN_LOG_INTERVAL_S
from tests.cli.tiny import write_tiny_model

FLAGS = ("--torch-dtype", "float32", "--device", "cpu", "--threads", "1")
READY_S = 150.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


class Daemon:
    """`nesa-node run` with its two outputs in files."""

    def __init__(self, folder: Path, name: str, *flags: str) -> None:
        self.ready = folder / f"{name}.json"
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        command = [sys.executable, "-m", "nesa_node", "run", "--public-name", name]
        command += ["--identity-path", str(folder / f"{name}.key")]
        command += ["--ready-file", str(self.ready)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *FLAGS, *flags],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=dict(os.environ),
            )

    def wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self.ready.exists():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture
def daemons() -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.timeout(400)
def test_clients_find_the_node_of_this_machine_and_later_the_last_swarm(
    model: Path, tmp_path: Path, daemons: list[Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    daemons.append(
        Daemon(tmp_path, "one", str(model), "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
    )
    daemons[0].wait()
    time.sleep(0.5)
    (address,) = json.loads(daemons[0].ready.read_text())["addresses"]
    assert f"\nnesa-node run {model} --initial-peers {address}\n" in daemons[0].out.read_text()
    assert "speed_measurement_started" in daemons[0].err.read_text()

    assert run_command(["status", "--json"]) == 0
    said = capsys.readouterr()
    assert [node["public_name"] for node in json.loads(said.out)[0]["nodes"]] == ["one"]
    assert said.err.startswith("using the node one of tiny@")
    argv = ["generate", str(model), "-5 degrees", "--max-new-tokens", "2", "--dtype", "float32"]
    assert run_command(argv) == 0
    assert run_command(["status", "--initial-peers", f"127.0.0.1:{port}"]) == 0
    assert daemons[0].stop() == 0
    capsys.readouterr()
    assert run_command(["status"]) == 5
    said = capsys.readouterr()
    assert re.match(rf"using the last swarm, /ip4/127.0.0.1/tcp/{port}, used ", said.err)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", ["api", "dashboard"])
def test_gateways_and_dashboards_remember_the_swarm(
    command: str, model: Path, tmp_path: Path, state: Path, daemons: list[Daemon]
) -> None:
    port = free_port()
    daemons.append(
        Daemon(tmp_path, "one", str(model), "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
    )
    daemons[0].wait()
    argv = [sys.executable, "-m", "nesa_node", command, "--listen", "127.0.0.1:0"]
    argv += ["--initial-peers", f"127.0.0.1:{port}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "listens on http" in process.stdout.readline()
            last = json.loads((state / "nesa-node" / "swarms" / "last-swarm.json").read_text())
            assert last["addresses"] == [f"/ip4/127.0.0.1/tcp/{port}"]
        finally:
            process.terminate()
    assert process.returncode == 0
    assert daemons[0].stop() == 0


@pytest.mark.timeout(400)
def test_a_node_started_before_the_first_one_waits_for_it(
    model: Path, tmp_path: Path, daemons: list[Daemon]
) -> None:
    port = free_port()
    peers = ["--initial-peers", f"127.0.0.1:{port}", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    daemons.append(Daemon(tmp_path, "two", str(model), *peers))
    began = time.monotonic()
    deadline = began + READY_S
    while "initial_peers_awaited" not in daemons[0].err.read_text():
        assert daemons[0].process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    daemons.append(
        Daemon(tmp_path, "one", str(model), "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
    )
    for daemon in daemons:
        daemon.wait()
    lines = daemons[0].err.read_text().count("initial_peer")
    assert lines <= 2 + (time.monotonic() - began) / JOIN_LOG_INTERVAL_S
    for daemon in daemons:
        assert daemon.stop() == 0


@pytest.mark.timeout(300)
def test_a_node_that_waits_for_its_peers_can_be_stopped_and_gives_up_in_time(
    model: Path, tmp_path: Path, daemons: list[Daemon]
) -> None:
    peers = ["--initial-peers", f"127.0.0.1:{free_port()}", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    daemons.append(Daemon(tmp_path, "two", str(model), *peers))
    daemons.append(Daemon(tmp_path, "three", str(model), *peers, "--join-timeout-s", "1.5"))
    assert daemons[1].process.wait(READY_S) == 5
    assert "error: none of the initial peers answered" in daemons[1].err.read_text()
    assert daemons[0].stop() == 0
    assert "Traceback" not in daemons[0].err.read_text()


@pytest.mark.timeout(400)
def test_another_copy_of_the_model_is_told_by_both_names(
    model: Path, tmp_path: Path, daemons: list[Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy" / "tiny"
    shutil.copytree(model, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros_like(weights["model.norm.weight"])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    daemons.append(Daemon(tmp_path, "one", str(model), "--host-maddrs", "/ip4/127.0.0.1/tcp/0"))
    daemons[0].wait()
    began = time.monotonic()
    assert run_command(["generate", str(copy), "hello", "--dtype", "float32"]) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: the swarm serves tiny@\w+, and the copy here differs \(@\w+\)", said)
    assert time.monotonic() - began < 20
    assert daemons[0].stop() == 0
