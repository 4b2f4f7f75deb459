"""What runs beside a daemon: a metrics server (`--metrics`), an orchestrator's web page (`--http`),
and a node's gateway (`run --api`).

The gateway is a child process, so that HTTP never delays a step.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nesa_node import __version__
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.swarm.p2p.tasks import stop_process

if TYPE_CHECKING:
    from nesa_node.core.ids import ModelId
    from nesa_node.core.metrics import MetricRegistry
    from nesa_node.core.settings.models import MetricsConfig, NodeConfig, OrchestratorConfig
    from nesa_node.server.node.daemon import SideTask
    from nesa_node.server.orchestrator.history import History
    from nesa_node.swarm.node import Swarm

log = get_logger(__name__)


@asynccontextmanager
async def serve_metrics_of(config: MetricsConfig) -> AsyncIterator[MetricRegistry | None]:
    """The sources of a metrics server; None without `config.metrics`."""
    if config.metrics is None:
        yield None
        return
    # Imported here since it takes a quarter of a second.
    from nesa_node.core.metrics import MetricRegistry
    from nesa_node.web.server import serve_metrics

    sources = MetricRegistry(__version__)
    async with serve_metrics(sources, HttpAddress.parse(config.metrics)):
        yield sources


@asynccontextmanager
async def serve_page_of(
    config: OrchestratorConfig,
) -> AsyncIterator[Callable[[Swarm, ModelId, History], None] | None]:
    """A function that shows the swarm on a page; None without `config.http`."""
    if config.http is None:
        yield None
        return
    # Imported here since it takes half a second.
    from nesa_node.core.settings.declaration import default_audits_path
    from nesa_node.dashboard.app import Dashboard, make_app
    from nesa_node.swarm.p2p.tasks import TaskSet
    from nesa_node.web.server import serve_app

    page, watching = Dashboard(audits_path=default_audits_path()), TaskSet()

    async def watch(swarm: Swarm) -> None:
        """Keep the page up to date from the orchestrator's own DHT node."""
        async with page.watch_swarm(swarm):
            await asyncio.Event().wait()

    def show(swarm: Swarm, model: ModelId, history: History) -> None:
        page.topologies.set_source(model, history)
        if not watching:
            watching.start(watch(swarm), name="page")

    async with serve_app(make_app(page), HttpAddress.parse(config.http), flag="--http"):
        try:
            yield show
        finally:
            await watching.close()


FIRST_RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0
_STABLE_RUN_S = 60.0
_STOP_TIMEOUT_S = 15.0


def make_gateway_runner(config: NodeConfig, config_path: Path | None) -> SideTask | None:
    """Function that runs a gateway beside the node; None without `--api`.

    Raises already here what the gateway would raise later: `ConfigError` for an address that is
    public without a key, `AddressInUseError` if it cannot listen there.
    """
    if config.api is None:
        return None
    from nesa_node.core.settings.models import AccessConfig
    from nesa_node.core.settings.sources import load_config
    from nesa_node.web.authenticator import Authenticator
    from nesa_node.web.server import check_can_listen

    access = load_config(AccessConfig, {}, os.environ, config_path)
    address = HttpAddress.parse(config.api)
    Authenticator(access).check_exposure(address)
    check_can_listen(address, "--api")
    return partial(supervise_gateway, config, config_path)


async def supervise_gateway(
    config: NodeConfig, config_path: Path | None, addresses: Sequence[str]
) -> None:
    """Run `nesa-node api`, restarting it with backoff when it ends; stop it when cancelled."""
    pause_s = FIRST_RESTART_DELAY_S
    while True:
        began = time.monotonic()
        code = await _run_once(config, config_path, addresses)
        if time.monotonic() - began > _STABLE_RUN_S:
            pause_s = FIRST_RESTART_DELAY_S
        log.error("gateway_ended", exit_code=code, again_in_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RESTART_DELAY_S)


async def _run_once(config: NodeConfig, config_path: Path | None, addresses: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="nesa-api-") as folder:
        # The environment may name a ready file, which is the node's.
        arguments = [
            *_gateway_arguments(config, config_path, addresses),
            f"--ready-file={folder}/ready",
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "nesa_node", "api", *arguments),
            # The gateway ends when this pipe closes, so also when this process is killed.
            stdin=asyncio.subprocess.PIPE,
            env=_gateway_environment(config),
            # Ctrl-C in the terminal must reach only the node, which stops the gateway.
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            await stop_process(process, _STOP_TIMEOUT_S)


def _gateway_arguments(
    config: NodeConfig, config_path: Path | None, addresses: Sequence[str]
) -> list[str]:
    arguments = ["--while-stdin", f"--model={config.model}", f"--listen={config.api}"]
    arguments += [f"--initial-peers={address}" for address in addresses]
    for name in ("cache_dir", "torch_dtype", "log_format", "log_level", "step_timeout_s"):
        arguments.append(f"--{name.replace('_', '-')}={getattr(config, name)}")
    for name in ("revision", "threads"):
        if (value := getattr(config, name)) is not None:
            arguments.append(f"--{name}={value}")
    if config.metrics is not None:
        # The environment or the file may name the node's address, so use any free port.
        arguments.append("--metrics=127.0.0.1:0")
    if config_path is not None:
        arguments.append(f"--config={config_path}")
    return arguments


def _gateway_environment(config: NodeConfig) -> Mapping[str, str]:
    """Environment with secrets: all users of the machine can read arguments of a process."""
    from nesa_node.core.settings.declaration import secret_text

    secrets = {"NESA_SWARM_KEY": config.swarm_key, "NESA_TOKEN": config.token}
    told = {name: text for name, value in secrets.items() if (text := secret_text(value))}
    return {**os.environ, **told}
