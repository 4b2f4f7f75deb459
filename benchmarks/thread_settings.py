"""What users run, without `--threads`, against every number of threads they could have given.

One session decodes the demo model through daemons of this machine: one on an idle machine, one
beside a busy process, three on an idle machine. Daemons and clients of all settings run at once
and take turns; those whose turn it is not are stopped (SIGSTOP), so that none of them is the load
of another. Start-up is timed before, one setting after the other. The client is a process of its
own, as `nesa-node generate` is one, with the same setting.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.swarms import open_local
from nesa_node.cli.services.local_swarm import LocalNode, local_swarm
from nesa_node.core.ids import split_evenly

DEFAULTS = Options(model="demo", nodes=(1, 3), runs=7, new_tokens=48)
QUICK = Options(model="tiny", nodes=(1,), runs=1, new_tokens=8, prompt_tokens=8)
WARM_TOKENS = 96
"""Until the node and the client have tried what there is to try."""
SPIN = "GOMP_SPINCOUNT"
ALL = psutil.cpu_count() or 1
_BUSY = (sys.executable, "-c", "while True: pass")
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Setting:
    """`spins`: idle threads wait as OpenMP itself has them wait, not as `nesa-node` does."""

    name: str
    threads: int | None
    spins: bool = False

    @property
    def flags(self) -> list[str]:
        return [] if self.threads is None else ["--threads", str(self.threads)]


SETTINGS = (
    Setting("default", None),
    *(Setting(str(threads), threads) for threads in sorted({1, ALL})),
    Setting(f"{ALL}, OpenMP's waiting", ALL, spins=True),
)


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    nodes: int
    busy: int


MACHINES = (Machine("idle", 1, 0), Machine("a busy process", 1, 1), Machine("three nodes", 3, 0))


def run(options: Options) -> list[dict[str, Any]]:
    """One row per machine and setting."""
    with model_folder(options) as folder:
        machines = [machine for machine in MACHINES if machine.nodes in options.nodes]
        rows = [row for machine in machines for row in measure(folder, machine, options)]
    show(rows)
    return rows


def measure(folder: Path, machine: Machine, options: Options) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        load_before = os.getloadavg()
        stack.enter_context(busy_processes(machine.busy))
        sides = []
        for setting in SETTINGS:
            side = stack.enter_context(open_side(folder, machine, setting, options))
            side.generate(WARM_TOKENS if setting.threads is None else 8)
            side.pause()
            sides.append(side)
            ready_s = max(node.startup_s for node in side.nodes)
            line = f"{machine.name}, threads {setting.name}: serves after {ready_s:.1f} s"
            print(line, file=sys.stderr, flush=True)
        rates: dict[str, list[float]] = {setting.name: [] for setting in SETTINGS}
        texts = []
        for _ in range(options.runs):
            for side in sides:
                side.resume()
                # The first tokens after a pause find cold caches.
                side.generate(8)
                rate, text = side.generate(options.new_tokens)
                side.pause()
                rates[side.setting.name].append(rate)
                texts.append(text)
        best = max(median(rates[one.name]) for one in SETTINGS if one.threads is not None)
        return [
            {
                "beside": machine.name,
                "threads": side.setting.name,
                "nodes": machine.nodes,
                "tokens_per_s": median(rates[side.setting.name]),
                "ratio_to_best": median(rates[side.setting.name]) / best,
                "ready_s": [node.startup_s for node in side.nodes],
                "tokens_equal": all(text == texts[0] for text in texts),
                "runs": rates[side.setting.name],
                "load_before": load_before,
            }
            for side in sides
        ]


@dataclass(slots=True)
class Side:
    """The daemons and the client of one setting."""

    setting: Setting
    nodes: list[LocalNode]
    client: subprocess.Popen[str]

    def generate(self, tokens: int) -> tuple[float, list[int]]:
        """Tokens per second of one `generate` call, and the tokens."""
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        print(tokens, file=self.client.stdin, flush=True)
        line = self.client.stdout.readline()
        if not line:
            raise RuntimeError(f"the client with threads {self.setting.name} ended; see its output")
        answer = json.loads(line)
        return answer["tokens_per_s"], answer["tokens"]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in (*(node.process.pid for node in self.nodes), self.client.pid):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for one in (*process.children(recursive=True), process):
                    with suppress(psutil.NoSuchProcess):
                        one.send_signal(number)


@contextmanager
def open_side(folder: Path, machine: Machine, setting: Setting, options: Options) -> Iterator[Side]:
    spans = split_evenly(open_local(folder).num_blocks, machine.nodes)
    # The record of a node that is stopped for minutes must be there when it goes on.
    flags = ["--torch-dtype", options.dtype, "--device", "cpu", "--record-ttl-s", "600"]
    environment = spinning() if setting.spins else None
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(
            folder, spans, Path(temporary), flags=[*flags, *setting.flags], environment=environment
        ) as nodes,
    ):
        addresses = [address for node in nodes for address in node.addresses[:1]]
        command = [sys.executable, "-m", "benchmarks.thread_client", str(folder), *addresses]
        command += ["--dtype", options.dtype, "--prompt-tokens", str(options.prompt_tokens)]
        client = subprocess.Popen(
            [*command, *setting.flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C, or a time limit, must reach the benchmark alone.
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        side = Side(setting, nodes, client)
        try:
            yield side
        finally:
            side.resume()
            try:
                # At the end of its input it leaves the swarm.
                client.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                client.kill()
                client.communicate()


def spinning() -> dict[str, str]:
    """The environment in which GNU's OpenMP waits as it does by itself."""
    return {SPIN: "300000"}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen(_BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def show(rows: Sequence[dict[str, Any]]) -> None:
    cells = [
        (
            row["beside"],
            row["threads"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio_to_best']:.2f}",
            f"{max(row['ready_s']):.1f}",
            "yes" if row["tokens_equal"] else "NO",
        )
        for row in rows
    ]
    print_table(
        "one session, by --threads", "machine|threads|tokens/s|of best|ready s|equal", cells
    )
