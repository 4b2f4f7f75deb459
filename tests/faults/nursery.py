"""Daemons that start in a moment, for tests that kill and replace dozens of them.

A nursery is a process that has imported everything a daemon needs and forks one on request: a
process, a p2pd and a command line like any other daemon's, without five seconds of importing torch
and transformers. It speaks lines of JSON: {"run": argv, "log": path} is answered by {"pid": n},
{"poll": n} by {"code": exit code or null}.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POLL_S = 0.02


class Nursery:
    """Safe for several threads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._asking = threading.Lock()

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def run(self, argv: Sequence[str], log_path: Path) -> Forked:
        """Run `nesa-node` with `argv`, its output going to `log_path`."""
        return Forked(self, self.ask(run=list(argv), log=str(log_path))["pid"])


class Forked:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)["code"]
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s:g} s")
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def open_nursery() -> Iterator[Nursery]:
    """Whoever starts daemons ends them before this context does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        nursery = Nursery(process)
        nursery.ask(poll=None)
        yield nursery
    finally:
        process.communicate()


def main() -> None:
    import torch

    for module in ("nesa_node.server.node.daemon", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, int | None]
        if "run" in request:
            answer = {"pid": _fork(request["run"], request["log"])}
        else:
            answer = {"code": None if request["poll"] is None else _exit_code(request["poll"])}
        print(json.dumps(answer), flush=True)


def _fork(argv: Sequence[str], log_path: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((0, nothing), (1, log), (2, log)):
            os.dup2(target, number)
        from nesa_node.cli.app import run_command

        code = run_command(argv)
    except KeyboardInterrupt:
        # Interrupted before the command has taken charge.
        code = 130
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not `sys.exit`: the frames above are the nursery's.
        os._exit(code)


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    main()
