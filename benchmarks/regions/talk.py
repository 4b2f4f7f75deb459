"""Processes that take orders: a line of JSON on standard input, a line of JSON for an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.emulator.wan import Wan
from nesa_node.core.errors import SwarmError

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 10.0


class Talker:
    """Somebody in a site. One order at a time."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    def ask(self, do: str, **order: Any) -> Any:
        """Raises `SwarmError` with its log if it ends instead of answering."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            log = self._log_path.read_text(encoding="utf-8", errors="replace")
            raise SwarmError(f"a process ended instead of doing {do}:\n{log[-4000:]}")
        return json.loads(line)


@contextmanager
def talker(
    wan: Wan, site: str, module: str, settings: dict[str, Any], log_path: Path, env: dict[str, str]
) -> Iterator[Talker]:
    """`python -m MODULE SETTINGS` in a site; the end of its input is what it ends at."""
    with log_path.open("wb") as log:
        process = wan.popen(
            site,
            [sys.executable, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=_ROOT,
            env=env,
            start_new_session=True,
        )
    with process:
        try:
            yield Talker(process, log_path)
        finally:
            try:
                process.communicate(timeout=_PATIENCE_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                process.kill()


def obey(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The other side: answer each line until there are no more."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
