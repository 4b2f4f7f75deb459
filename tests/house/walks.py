"""Files of the package that take part in four walks: `python -m tests.house.walks [CHECKOUT ...]`.

Commands, HTTP, signals and the SDK drive each checkout from outside, so that renamed modules change
nothing here. Daemons on this machine serve a small random model. `hook/sitecustomize.py` records
the files of each process that had a call of a function within a window (not those imported only):

a token     Most windows of `TOKEN_S` seconds of one long greedy text, at its client or at one of
            three daemons. What runs every ten seconds, such as records, is in few of them.
a move      One window at the daemon in the middle, from the start of an orchestrator until it
            serves other blocks. One of two daemons with its old blocks takes over its session,
            which decodes meanwhile, so that the files of a token at a daemon are among these.
a record    Most windows of `RECORD_S` seconds at two idle daemons, in each of which they renew
            their records and keep those of each other; and most sessions of a client, from the
            request for one until its chain is open, since the SDK plans and opens in one call.
a request   All chat requests at the gateway, from the sending of the request to the answer's end.

"Most" is at least `MOST` of `WINDOWS` in one process. Where the machine is busy, windows hold fewer
tokens and more of what runs now and then: compare figures of a quiet machine only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.cli.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
WINDOWS, MOST = 12, 0.75
TOKEN_S = 0.4
RECORD_S = 2.6  # idle daemons whose records live for 6 s renew them every 2 s
PATIENCE_S = 180.0
POSITIONS = 65_536
# Of the tests' small model, so that a text does not end within the windows.
CHANGES = {"eos_token_id": None, "max_position_embeddings": POSITIONS}
CLIENT = """\
import os, pathlib, signal, sys, time, torch
from nesa_node import AutoDistributedModelForCausalLM
name, peer, ready = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
with AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=[peer]) as model:"""
TEXT = f"""
    model.generate(torch.full((1, 8), 5), max_new_tokens=32, do_sample=False)
    ready.write_text("null")
    model.generate(torch.full((1, 8), 5), max_new_tokens={POSITIONS // 2}, do_sample=False)
"""
SESSIONS = f"""
    for _ in range({WINDOWS} + 1):
        os.kill(os.getpid(), signal.SIGUSR1)
        with model.inference_session(64):
            os.kill(os.getpid(), signal.SIGUSR1)
    ready.write_text("null")
    time.sleep({PATIENCE_S})
"""


@dataclass
class Process:
    """A process with the hook, and the windows that it wrote."""

    popen: subprocess.Popen[bytes]
    folder: Path
    name: str
    read: int = 0  # windows that `new_windows` has returned

    def window(self, count: int) -> Path:
        return self.folder / "windows" / f"{self.popen.pid}-{count}.json"

    def new_windows(self) -> list[set[str]]:
        """Files of each window that was closed since the last call."""
        found = []
        while (path := self.window(2 * self.read + 2)).exists():
            found.append(set(json.loads(path.read_text("utf-8"))))
            self.read += 1
        return found

    def ready(self) -> Any:
        """What its ready file says, as soon as it exists."""
        path = self.folder / f"{self.name}.ready"
        self.wait_for(path.exists)
        return json.loads(path.read_text("utf-8"))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / f"{self.name}.log").read_text("utf-8", "replace")
                raise RuntimeError(f"{self.name} has ended or is late:\n{log[-4000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self.popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(20)
        self.popen.kill()
        self.popen.wait()


def record(
    processes: Sequence[Process], act: Callable[[], object], times: int, share: float = MOST
) -> set[str]:
    """Files that a process called in `share` of `times` windows, each as long as `act` takes."""
    for count in range(1, 2 * times + 1):
        for process in processes:
            process.popen.send_signal(signal.SIGUSR1)
        for process in processes:
            process.wait_for(process.window(2 * process.read + count).exists)
        if count % 2:
            act()
    return set().union(*(common(process.new_windows(), share) for process in processes))


def common(windows: Sequence[set[str]], share: float = MOST) -> set[str]:
    counts = Counter(file for window in windows for file in window)
    return {file for file, count in counts.items() if count >= share * len(windows)}


class Swarm:
    """Processes of the checkout `root`, in a folder that is removed at the end."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        # Paths of unix sockets must stay below 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="nw", dir="/tmp"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "windows").mkdir()
        self.model = str(write_tiny_model(self.folder / "tiny"))
        config = self.folder / "tiny" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | CHANGES), "utf-8")
        (self.folder / "tiny" / "generation_config.json").unlink()
        self.join: tuple[str, ...] = ()
        self.root = root
        self._stack = stack
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("NESA_")} | {
            "WALKS_FOLDER": str(self.folder / "windows"),
            "TMPDIR": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name: str, *arguments: str) -> Process:
        with (self.folder / f"{name}.log").open("wb") as log:
            channels: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            argv = [sys.executable, *arguments]
            path = f"{self.root}{os.pathsep}{Path(__file__).parent / 'hook'}"
            environment = self._environment | {"PYTHONPATH": path}
            popen = subprocess.Popen(argv, cwd=self.folder, env=environment, **channels)
        process = Process(popen, self.folder, name)
        self._stack.callback(process.stop)
        return process

    def command(self, name: str, *arguments: str) -> Process:
        arguments += ("--ready-file", f"{name}.ready", *self.join)
        return self.start(name, "-m", "nesa_node", *arguments)

    def member(self, name: str, command: str, *arguments: str) -> Process:
        """A member of the DHT with an identity of its own."""
        own = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--identity-path", f"{name}.key")
        return self.command(name, command, self.model, *own, *arguments)

    def daemon(self, name: str, *arguments: str) -> Process:
        """A daemon that pings no other one and fills no hole meanwhile."""
        quiet = ("--ping-every-s", "1000", "--rebalance-every-s", "1000", "--drain-timeout-s", "5")
        cache = ("--attn-cache-tokens", str(2 * POSITIONS), "--dtype", "float32", "--threads", "1")
        return self.member(name, "run", *quiet, *cache, *arguments)

    def client(self, name: str, work: str) -> Process:
        return self.start(name, "-c", CLIENT + work, self.model, self.join[-1], f"{name}.ready")

    def peer_id(self, name: str) -> str:
        """The peer id that the member `name` will have."""
        argv = ("-m", "nesa_node", "identity", "--identity-path", f"{name}.key")
        assert self.start("identity", *argv).popen.wait(PATIENCE_S) == 0
        return (self.folder / "identity.log").read_text("utf-8").split()[-1]


def walks_of(root: Path) -> dict[str, set[str]]:
    """Files of each walk, relative to the package of the checkout `root`."""
    with ExitStack() as stack:
        swarm = Swarm(root, stack)
        first = swarm.daemon("first", "--block-indices", "0:1")
        swarm.join = ("--initial-peers", first.ready()["addresses"][0])
        last = swarm.daemon("last", "--block-indices", "3:4")
        last.ready()
        follow = ("--follow-every-s", "2", "--allow-orchestrators", swarm.peer_id("planner"))
        middle = swarm.daemon("middle", "--num-blocks", "2", *follow)
        assert middle.ready()["span"] == [1, 3]
        walks = dict(_walks(swarm, middle, first, last))
    package = f"{root}{os.sep}nesa_node{os.sep}"
    return {
        name: {file.removeprefix(package) for file in files if file.startswith(package)}
        for name, files in walks.items()
    }


def _walks(swarm: Swarm, middle: Process, *ends: Process) -> Iterator[tuple[str, set[str]]]:
    text = swarm.client("text", TEXT)
    text.ready()
    time.sleep(2)
    yield "a token", record((text, middle, *ends), lambda: time.sleep(TOKEN_S), WINDOWS)
    blocks = ("--block-indices", "1:3", "--record-ttl-s", "6")
    twins = [swarm.daemon(name, *blocks) for name in ("twin", "third")]
    assert all(twin.ready() for twin in twins)
    yield "a move", record([middle], lambda: _move(swarm, middle), 1)
    assert text.popen.poll() is None, "the text has ended"
    text.stop()

    kept = record(twins, lambda: time.sleep(RECORD_S), WINDOWS)
    reader = swarm.client("reader", SESSIONS)
    reader.ready()
    yield "a record", kept | common(reader.new_windows()[1:])  # the first session joins the swarm

    own = ("--model", swarm.model, "--keys-path", "keys.json", "--listen", "127.0.0.1:0")
    gateway = swarm.command("gateway", "api", *own)
    url = f"{gateway.ready()['url']}/v1/chat/completions"
    messages = [{"role": "user", "content": "hello again"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 3}
    ask = partial(httpx.post, url, json=body, timeout=PATIENCE_S)
    yield "a request", record([gateway], lambda: ask().raise_for_status(), WINDOWS, 1.0)


def _move(swarm: Swarm, middle: Process) -> None:
    """Let an orchestrator plan until the daemon serves other blocks."""
    planner = swarm.member("planner", "orchestrate", "--orchestrate-every-s", "2")
    ready_file = swarm.folder / f"{middle.name}.ready"
    middle.wait_for(lambda: not ready_file.exists())
    assert middle.ready()["span"] != [1, 3]
    time.sleep(1)
    planner.stop()


def main(argv: list[str]) -> None:
    roots = [Path(argument).resolve() for argument in argv if argument != "--list"] or [ROOT]
    columns = [walks_of(root) for root in roots]
    print(f"{'files on the walk of':25}", *(f"{root.name:>20}" for root in roots))
    for name in columns[0]:
        print(f"{name:25}", *(f"{len(column[name]):>20}" for column in columns))
    for root, column in zip(roots, columns, strict=True):
        for name, files in column.items() if "--list" in argv else ():
            print(f"\n{root.name}, {name}:", *sorted(files), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
