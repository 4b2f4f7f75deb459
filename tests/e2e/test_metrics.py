"""Meeting points, orchestrators and gateways tell Prometheus what docs/metrics.md says they do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from nesa_node.cli.services.local_swarm import LOOPBACK, stop_processes
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import GatewayConfig, PeerConfig
from nesa_node.core.settings.sources import load_config
from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.e2e.gateway import gateway_process
from tests.server.node.test_metrics import exported, parsed, told_by
from tests.swarms import daemons

READY_S = 120.0


@contextmanager
def command(folder: Path, *argv: str) -> Iterator[str]:
    """A daemon that is ready, and the address of its metrics."""
    name = argv[0]
    ready, log_path = folder / f"{name}.json", folder / f"{name}.log"
    own = ["--identity-path", str(folder / f"{name}.key"), "--ready-file", str(ready)]
    own += ["--host-maddrs", LOOPBACK, "--metrics", "127.0.0.1:0"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nesa_node", *argv, *own], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.05)
        found = re.search(r"url=(http://\S+?)/", log_path.read_text())
        assert found is not None
        yield found[1]
    finally:
        stop_processes([process], timeout_s=60)
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kind_of_process_tells_what_is_documented(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with command(tmp_path, "bootstrap") as bootstrap:
        assert exported(parsed(httpx.get(f"{bootstrap}/metrics").text)) == told_by("bootstrap")
        addresses = json.loads((tmp_path / "bootstrap.json").read_text())["addresses"]
        flags = ("--initial-peers", *addresses, "--metrics", "127.0.0.1:0")
        with daemons(model, tmp_path, *flags) as swarm:
            swarm.start(Span(0, BLOCKS))
            states = (
                "--snapshots-dir",
                str(tmp_path / "s"),
                "--decisions-path",
                str(tmp_path / "d"),
            )
            orchestrator = ("orchestrate", "--initial-peers", *addresses, *states)
            with command(tmp_path, *orchestrator) as planner:
                _wait_for(planner, told_by("orchestrator"))
            with gateway_process(model, tmp_path, addresses) as gateway:
                assert httpx.get(f"{gateway.url}/health").status_code == 200
                _wait_for(gateway.url, told_by("gateway"))


def _wait_for(url: str, names: set[str]) -> None:
    deadline = time.monotonic() + READY_S
    while (told := exported(parsed(httpx.get(f"{url}/metrics").text))) != names:
        assert time.monotonic() < deadline, told ^ names
        time.sleep(0.2)


@pytest.mark.parametrize("config", [PeerConfig, GatewayConfig])
def test_metrics_stay_on_this_machine_unless_told(
    config: type[PeerConfig] | type[GatewayConfig],
) -> None:
    assert load_config(config, {"metrics": "127.0.0.1:9400"}, {}).metrics == "127.0.0.1:9400"
    with pytest.raises(ConfigError, match="metrics_beyond_loopback"):
        load_config(config, {"metrics": "0.0.0.0:9400"}, {})
    told = {"metrics": "0.0.0.0:9400", "metrics_beyond_loopback": True}
    assert load_config(config, told, {}).metrics == "0.0.0.0:9400"
