"""Gateway of a node (`run --api`): a child process, so that HTTP never delays a step."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nesa_node.core.logging import get_logger
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import AccessConfig, NodeConfig
from nesa_node.core.settings.sources import load_config

if TYPE_CHECKING:
    from nesa_node.server.node.daemon import SideTask

log = get_logger(__name__)

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
            await _stop_process(process)


async def _stop_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


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
    secrets = {"NESA_SWARM_KEY": config.swarm_key, "NESA_TOKEN": config.token}
    told = {name: text for name, value in secrets.items() if (text := secret_text(value))}
    return {**os.environ, **told}
