"""Private deployments for tests: members of this process or daemons, and a model placed on them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any, Literal, TypeVar

from nesa_node.cli.services.local_swarm import LOOPBACK, start_process, stop_processes
from nesa_node.client.deployment.deployment_connection import open_owner_swarm
from nesa_node.client.deployment.deployment_file import Deployment, DeploymentFile
from nesa_node.client.deployment.operations import DeploymentPlan, deploy
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.core.ids import PeerId
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.swarm.node import Swarm
from tests.swarms import READY_S, NodeThread

T = TypeVar("T")


@contextmanager
def shard_members(folder: Path, count: int, **options: Any) -> Iterator[list[str]]:
    """Members in this process; yields their addresses."""
    with NodeThread() as thread:
        found: list[str] = []
        for number in range(count):
            config = NodeConfig.model_validate(
                {
                    "shards_gib": 1,
                    "host_maddrs": (LOOPBACK,),
                    "identity_path": folder / f"member-{number}.key",
                    "ready_file": folder / f"member-{number}.json",
                    "device": "cpu",
                    "drain_timeout_s": 2,
                }
                | options
            )
            found += thread.start_and_wait(config)
        yield found


@dataclass(frozen=True, slots=True)
class ShardDaemon:
    """A real `nesa-node run --shards-gib` process."""

    process: Popen[bytes]
    folder: Path
    """Its home; all that it writes is there or in `temporary`."""
    temporary: Path
    address: str
    peer_id: PeerId
    flags: tuple[str, ...]
    stack: ExitStack

    def kill(self) -> None:
        """As a power cut would: no goodbye."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def restart(self) -> ShardDaemon:
        """Start it again, at the same address."""
        (self.folder / "ready.json").unlink(missing_ok=True)
        listen = self.address.partition("/p2p/")[0]
        return _wait(_start(self.stack, self.folder, self.temporary, listen, self.flags), self)


@contextmanager
def shard_daemons(folder: Path, count: int, *flags: str) -> Iterator[list[ShardDaemon]]:
    """Daemons in homes below `folder`; whatever still runs at the end is stopped."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            home = folder / f"home-{number}"
            home.mkdir(parents=True)
            # Sockets are there: their paths must be short.
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="d")))
            process = _start(stack, home, temporary, LOOPBACK, flags)
            started.append(ShardDaemon(process, home, temporary, "", PeerId(""), flags, stack))
        yield [_wait(each.process, each) for each in started]


def _start(
    stack: ExitStack, home: Path, temporary: Path, listen: str, flags: Sequence[str]
) -> Popen[bytes]:
    command = [sys.executable, "-m", "nesa_node", "run", "--shards-gib", "1", "--threads", "1"]
    command += ["--host-maddrs", listen, "--ready-file", str(home / "ready.json"), *flags]
    own = {name: value for name, value in os.environ.items() if name[:5] != "NESA_"}
    own |= {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(Path.cwd())}
    process = start_process(command, home / "log", environment=own)
    stack.callback(stop_processes, [process])
    return process


def _wait(process: Popen[bytes], daemon: ShardDaemon) -> ShardDaemon:
    deadline, ready = time.monotonic() + READY_S, daemon.folder / "ready.json"
    while not ready.exists():
        assert process.poll() is None, (daemon.folder / "log").read_text()
        assert time.monotonic() < deadline, f"{daemon.folder.name} does not serve"
        time.sleep(0.1)
    found = json.loads(ready.read_text())
    return replace(
        daemon,
        process=process,
        address=found["addresses"][0],
        peer_id=PeerId(found["peer_id"]),
    )


def run_as_owner(addresses: Sequence[str], work: Any, identity_path: Path | None = None) -> Any:
    """What the coroutine `work(swarm)` returns, in an owner's network of these members."""

    options = ConnectionOptions(identity_path=identity_path)

    async def run() -> Any:
        async with open_owner_swarm(options, addresses) as swarm:
            return await work(swarm)

    return asyncio.run(run())


def place(
    model: Path,
    addresses: Sequence[str],
    file: DeploymentFile,
    *,
    splits: int = 2,
    verifiers: int = 1,
    client_blocks: tuple[int, int] = (1, 1),
    cache_tokens: int = 2048,
    dtype: Literal["float32", "bfloat16"] = "float32",
    identity_path: Path | None = None,
) -> Deployment:
    """Deploy `model` as `nesa-node deploy` does."""
    checkpoint = open_checkpoint(str(model), cache_dir=model)
    plan = DeploymentPlan(
        model=compute_model_id(checkpoint),
        addresses=tuple(addresses),
        splits=splits,
        verifiers=verifiers,
        client_blocks=client_blocks,
        cache_tokens=cache_tokens,
        dtype=dtype,
        identity_path=None if identity_path is None else str(identity_path),
    )

    def work(swarm: Swarm) -> Coroutine[Any, Any, Deployment]:
        return deploy(plan, checkpoint, file, swarm, lambda _: None)

    deployment: Deployment = run_as_owner(addresses, work, identity_path)
    return deployment
