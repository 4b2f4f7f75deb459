"""The daemons of three regions, their orchestrators, and those who look at them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulator.wan import Wan, open_wan
from benchmarks.options import Options
from benchmarks.regions.talk import Talker, talker
from benchmarks.regions.world import (
    BOSS,
    CLIENTS,
    LOST,
    REGIONS,
    SECOND_BOSS,
    World,
    connect,
    make_world,
    region,
)
from benchmarks.swarms import READY_TIMEOUT_S, daemon_flags, open_local
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.topology.snapshot import NodeState, Snapshot

CACHE_TOKENS = 8192
AT_ONCE = 3
"""Nodes that start together: each measures its speed meanwhile."""
PORT = 4001
NEVER_S = 1e9
_ROOT = Path(__file__).parents[2]
_POLL_S = 0.25
_STOP_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often everybody looks; those of the program by default."""

    record_ttl_s: float = 60.0
    orchestrate_every_s: float = 30.0
    lease_ttl_s: float = 60.0
    follow_every_s: float = 15.0
    step_timeout_s: float = 30.0


SWIFT = Pace(
    record_ttl_s=20.0,
    orchestrate_every_s=5.0,
    lease_ttl_s=15.0,
    follow_every_s=4.0,
    step_timeout_s=6.0,
)


@dataclass(frozen=True, slots=True)
class Look:
    """What an observer has seen."""

    snapshot: Snapshot
    unmeasured: int
    """Pairs of nodes of which neither says how far the other is."""
    packed_bytes: tuple[int, ...]
    leading: Mapping[str, int]
    """Epochs by signer."""


@dataclass
class Regions:
    """Made by `open_regions`."""

    wan: Wan
    world: World
    pace: Pace
    options: Options
    model: Path
    keys: Path
    folder: Path
    stack: ExitStack
    env: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    observers: dict[str, Talker] = field(default_factory=dict)
    """By region."""
    clients: dict[str, Talker] = field(default_factory=dict)
    """By site."""

    def peer(self, site: str) -> PeerId:
        return Identity.load_or_create(self.keys / f"{site}.key").peer_id

    def address(self, site: str) -> str:
        return f"/ip4/{self.wan.address(site)}/tcp/{PORT}/p2p/{self.peer(site)}"

    def site_of(self) -> dict[PeerId, str]:
        return {self.peer(site): site for site in self.processes}

    def entries(self, *regions: str) -> list[str]:
        """Addresses to join at."""
        return [self.address(f"{name}1") for name in regions or REGIONS]

    def look(self, name: str = "a") -> Look:
        seen = self.observers[name].ask("look")
        nodes, joining = (
            tuple(_state(fields) for fields in seen[key]) for key in ("nodes", "joining")
        )
        if not nodes:
            raise SwarmError(f"region {name} sees nobody")
        return Look(
            Snapshot(
                ModelId(seen["model_id"]), seen["num_blocks"], nodes, seen["taken_at"], joining
            ),
            seen["unmeasured"],
            tuple(seen["packed_bytes"]),
            seen["leading"],
        )

    def events(self, site: str, name: str) -> list[dict[str, Any]]:
        """What a process has logged under that name."""
        found = []
        for line in (self.folder / f"{site}.log").read_text(errors="replace").splitlines():
            if name in line and line.startswith("{"):
                event = json.loads(line)
                if event["event"] == name:
                    found.append(event)
        return found

    def moves(self) -> list[str]:
        """All that has begun so far."""
        return [
            f"{site} {event['was']} to {event['to']}"
            for site in self.processes
            for event in self.events(site, "move_started")
        ]

    def start_node(self, site: str, span: Span, *own: str, flags: Sequence[str] = ()) -> None:
        """`own` are flags of `benchmarks.regions.daemon`."""
        command = ["-m", "benchmarks.regions.daemon", *own, "run", str(self.model)]
        command += ["--block-indices", str(span), "--public-name", site]
        command += ["--follow-every-s", str(self.pace.follow_every_s)]
        command += ["--step-timeout-s", str(self.pace.step_timeout_s)]
        common = daemon_flags(self.options, CACHE_TOKENS)[:-2]
        self._start(site, [*command, *common, *flags])

    def start_boss(self, site: str) -> None:
        command = ["-m", "nesa_node", "orchestrate"]
        command += ["--orchestrate-every-s", str(self.pace.orchestrate_every_s)]
        command += ["--lease-ttl-s", str(self.pace.lease_ttl_s)]
        command += ["--replicas", str(self.world.replicas)]
        command += ["--decisions-path", str(self._decisions(site))]
        self._start(site, command)

    def decisions(self, site: str) -> list[Mapping[str, Any]]:
        """What the orchestrator there decided, in order; without a move, not `published`."""
        kept = DecisionLog(self._decisions(site)).recent(1000)
        return [decision.body for decision in kept if decision.kind == "placement"]

    def _decisions(self, site: str) -> Path:
        return self.folder / f"{site}-decisions.db"

    def _start(self, site: str, command: Sequence[str]) -> None:
        common = ["--identity-path", str(self.keys / f"{site}.key"), "--log-format", "json"]
        common += ["--host-maddrs", f"/ip4/{self.wan.address(site)}/tcp/{PORT}"]
        common += ["--ready-file", str(self.folder / f"{site}.json"), "--log-level", "info"]
        common += ["--record-ttl-s", str(self.pace.record_ttl_s)]
        for peer in (self.peer(BOSS), self.peer(SECOND_BOSS)):
            common += ["--allow-orchestrators", peer]
        entries = [address for address in self.entries() if address != self.address(site)]
        if self.processes:
            common += ["--initial-peers", *entries]
        with (self.folder / f"{site}.log").open("ab") as log:
            self.processes[site] = self.wan.popen(
                site,
                [sys.executable, *command, *common],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=self.env,
                start_new_session=True,
            )

    def wait_ready(self, *sites: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        for site in sites:
            while not (self.folder / f"{site}.json").exists():
                if self.processes[site].poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / f"{site}.log").read_text(errors="replace")
                    raise SwarmError(f"{site} does not come to serve:\n{log[-4000:]}")
                time.sleep(_POLL_S)

    def stop(self, *sites: str) -> None:
        """In order, all at once; whoever does not end is killed."""
        gone = [self.processes.pop(site) for site in sites]
        for process in gone:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for process in gone:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def join(self, site: str, module: str, **settings: Any) -> Talker:
        """Somebody at `site` who takes orders, joined through the nodes of its own region."""
        made = {"folder": str(self.model), "peers": self.entries(region(site)), **settings}
        log_path = self.folder / f"{site}-{module.rpartition('.')[2]}.log"
        return self.stack.enter_context(talker(self.wan, site, module, made, log_path, self.env))


@contextmanager
def open_regions(
    model: Path, options: Options, pace: Pace, keys: Path, *, pings: bool = True
) -> Iterator[Regions]:
    """All nodes serve when it is entered, and the orchestrator of region a leads.

    `keys` takes their identities: with the same ones the same members keep the same records.
    Without `pings` nobody measures how far others are.
    """
    world = make_world(open_local(model).num_blocks, options.nodes[0])
    with ExitStack() as stack:
        wan = stack.enter_context(
            open_wan(world.sites, seed=options.seed, congestion_control=options.congestion_control)
        )
        connect(wan, world, options.seed)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="nesa-bench-")))
        regions = Regions(
            wan, world, pace, options, model, keys, folder, stack, _environment(folder)
        )
        stack.callback(lambda: regions.stop(*regions.processes))
        flags = () if pings else ("--ping-every-s", str(NEVER_S))
        first, *others = world.nodes
        regions.start_node(first, world.spans[first], flags=flags)
        regions.wait_ready(first)
        for pair in batched(others, AT_ONCE):
            for site in pair:
                regions.start_node(site, world.spans[site], flags=flags)
            regions.wait_ready(*pair)
        for name, site in (("a", CLIENTS[0]), (LOST, SECOND_BOSS)):
            regions.observers[name] = regions.join(site, "benchmarks.regions.observer")
        regions.start_boss(BOSS)
        _wait_for_leader(regions, BOSS)
        regions.start_boss(SECOND_BOSS)
        regions.wait_ready(SECOND_BOSS)
        yield regions


def batched(sites: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(sites), size):
        yield sites[start : start + size]


def _wait_for_leader(regions: Regions, site: str) -> None:
    regions.wait_ready(site)
    deadline = time.monotonic() + 3 * regions.pace.lease_ttl_s + READY_TIMEOUT_S
    while regions.peer(site) not in regions.look().leading:
        if time.monotonic() > deadline:
            raise SwarmError(f"{site} does not come to lead")
        time.sleep(1.0)


def _environment(folder: Path) -> dict[str, str]:
    """Ours, without the settings that a user has made for daemons of their own."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("NESA_")}
    return {**ours, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}


def _state(fields: dict[str, Any]) -> NodeState:
    tuples = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return NodeState(**{**fields, **tuples, "span": Span(**fields["span"])})
