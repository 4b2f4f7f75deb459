"""The gateway as a command, and as a node's child."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from nesa_node.cli.app import fill_optional_values, run_command
from nesa_node.cli.services.side_services import make_gateway_runner
from nesa_node.core.errors import AddressInUseError
from nesa_node.core.settings.models import NodeConfig
from nesa_node.swarm.p2p.p2pd import remove_stale_directories
from tests.cli.tiny import write_tiny_model

NODE = ("--torch-dtype", "float32", "--threads", "1", "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
LISTENS = "nesa-node api listens on "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def node_with_gateway(model: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "nesa_node", "run", str(model), "--api", "127.0.0.1:0"]
    command += [*NODE, "--identity-path", str(folder / "key")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        _sweep(Path(tempfile.gettempdir()))


def _sweep(folder: Path) -> None:
    """What killed processes could not remove: runtime directories, and clients' keys."""
    remove_stale_directories(folder)
    for kind in ("nesa-gateway-*", "nesa-client-*", "nesa-api-*"):
        for left in folder.glob(kind):
            shutil.rmtree(left)


def address_in(output: IO[str] | None) -> str:
    assert output is not None
    for line in output:
        if line.startswith(LISTENS):
            return line.removeprefix(LISTENS).strip()
    raise AssertionError("the gateway never listened")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_node_keeps_a_gateway_beside_it(model: Path, tmp_path: Path) -> None:
    with node_with_gateway(model, tmp_path) as node:
        url = address_in(node.stdout)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{url}/chat/completions", json=body | {"max_tokens": 4}, timeout=60)
        assert answer.status_code == 200, answer.text
        (child,) = [c for c in psutil.Process(node.pid).children() if "api" in c.cmdline()]
        child.kill()
        url = address_in(node.stdout)
        assert httpx.get(f"{url}/models", timeout=60).json()["data"][0]["id"] == "tiny"
        assert "gateway_ended" in (tmp_path / "log").read_text()
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_gateway_ends_with_its_node_however_that_ends(model: Path, tmp_path: Path) -> None:
    with node_with_gateway(model, tmp_path) as node:
        address_in(node.stdout)
        family = psutil.Process(node.pid).children(recursive=True)
        node.kill()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left


def test_an_address_after_api_may_be_left_away() -> None:
    assert list(fill_optional_values(["run", "m", "--api"])) == [
        "run",
        "m",
        "--api",
        "127.0.0.1:8000",
    ]
    assert list(fill_optional_values(["run", "--api", "[::1]:80", "m"])) == [
        "run",
        "--api",
        "[::1]:80",
        "m",
    ]
    assert list(fill_optional_values(["run", "--api", "model"]))[-2:] == ["127.0.0.1:8000", "model"]


def test_an_address_that_others_reach_needs_a_key(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESA_KEYS_PATH", str(tmp_path / "keys.json"))
    assert run_command(["run", str(model), "--api", "0.0.0.0:8000"]) == 2
    assert "--api-key" in capsys.readouterr().err


def test_a_taken_port_is_told_before_the_node_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        told = f"cannot listen on {address}: Address already in use; give another port with --api"
        with pytest.raises(AddressInUseError, match=told):
            make_gateway_runner(NodeConfig(model="tiny", api=address), None)
    assert make_gateway_runner(NodeConfig(model="tiny", api=address), None) is not None


def test_a_gateway_without_peers_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where no node runs, and no swarm was ever used.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_command(["api"]) == 2
    assert "--initial-peers is required" in capsys.readouterr().err
