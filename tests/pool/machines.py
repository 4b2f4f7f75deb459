"""Daemons of a pool on this machine: an orchestrator and machines without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nesa_node.cli.services.local_swarm import LOOPBACK, log_tail, start_process, stop_processes

READY_S = 240.0


@dataclass
class Pool:
    """Processes whose settings, keys and downloads lie in `folder`."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()

    @property
    def cache_dir(self) -> Path:
        return self.folder / "cache"

    def environment(self, user: str = "operator") -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("NESA_")}
        return own | {
            "XDG_CONFIG_HOME": str(self.folder / user / "config"),
            "XDG_STATE_HOME": str(self.folder / user / "state"),
        }

    def start(self, name: str, *command: str, module: str = "nesa_node") -> None:
        """Start a daemon; the first one is what the others join through."""
        argv = [sys.executable, "-m", module, *command, "--host-maddrs", LOOPBACK]
        argv += ["--ready-file", str(self.folder / f"{name}.json")]
        if "--cache-dir" not in command:
            argv += ["--cache-dir", str(self.cache_dir)]
        argv += ["--initial-peers", *self.addresses] if self.addresses else []
        log = self.folder / f"{name}.log"
        process = self.processes[name] = start_process(argv, log, environment=self.environment())
        if not self.addresses:
            ready = self.folder / f"{name}.json"
            self.wait(
                lambda: ready.exists() or process.poll() is not None, READY_S, f"{name} to start"
            )
            assert ready.exists(), log_tail(log, 5)
            self.addresses = tuple(json.loads(ready.read_text())["addresses"])

    def start_machine(
        self, name: str, *flags: str, threads: int = 1, module: str = "nesa_node"
    ) -> None:
        key = ("--identity-path", str(self.folder / f"{name}.key"), "--public-name", name)
        own = ("--threads", f"{threads}", "--device", "cpu", *key, *flags)
        self.start(name, "run", *own, module=module)

    def swarm(self, *arguments: str, user: str = "operator") -> subprocess.CompletedProcess[str]:
        """Run `nesa-node swarm` as a user."""
        argv = [sys.executable, "-m", "nesa_node", "swarm", *arguments]
        argv += ["--initial-peers", *self.addresses]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=300, env=self.environment(user)
        )

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.swarm("pool", "--json").stdout)
        return found

    def held(self, model: str, state: str) -> list[str]:
        """Names of the machines that hold a model, in a state."""
        return [
            machine["public_name"]
            for machine in self.view()["machines"]
            for each in machine["held"]
            if each["model"] == model and each["state"] == state
        ]

    def wait(self, happened: Callable[[], Any], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            logs = "\n".join(log_tail(path, 5) for path in sorted(self.folder.glob("*.log")))
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}:\n{logs}"
            time.sleep(0.2)


@contextmanager
def open_pool(folder: Path, machines: Sequence[Sequence[str]]) -> Iterator[Pool]:
    """An orchestrator, and a machine for each of these lists of flags."""
    pool = Pool(folder)
    pool.cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        pool.start("orchestrator", "orchestrate", "--lease-ttl-s", "4")
        for number, flags in enumerate(machines, 1):
            pool.start_machine(f"machine-{number}", *flags)
        count = len(machines)
        pool.wait(lambda: len(pool.view()["machines"]) == count, READY_S, f"{count} offers")
        yield pool
    finally:
        # Machines stop their nodes first.
        stop_processes(list(pool.processes.values()), timeout_s=90)
