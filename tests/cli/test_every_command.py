"""Every command of the application, typed with nothing, with --help and with --json."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from nesa_node.cli.app import app, run_command

DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 130, 143, -signal.SIGINT}
"""The last: the signal came while Python itself was ending."""
WAITS_AT_MOST_S = 6.0
STOPS_WITHIN_S = 40.0


def commands(of: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, nested ones included; of the application itself none."""
    yield path
    for name in of:
        if not name.startswith("-"):
            yield from commands(of[name], (*path, name))


COMMANDS = list(commands(app))


def test_nested_commands_are_found() -> None:
    assert {("run",), ("eval",), ("keys", "add")} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_is_printed(
    words: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*words, flag]) == 0
    said = capsys.readouterr()
    assert " ".join(("Usage: nesa-node", *words)) in said.out
    assert " STR" not in said.out
    assert said.err == ""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["nothing", "json"])
def test_no_command_ends_in_a_traceback(
    words: tuple[str, ...], flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Commands that go on are interrupted: that is no error either."""
    command = subprocess.Popen(
        [sys.executable, "-m", "nesa_node", *words, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("STATE", "CONFIG", "CACHE")},
    )
    deadline = time.monotonic() + WAITS_AT_MOST_S
    while command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if command.poll() is None:
        command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=STOPS_WITHIN_S)
    assert "Traceback" not in said
    assert command.returncode in DOCUMENTED, said
    assert command.returncode != 1 or words == ("doctor",), said
    if command.returncode not in (0, 1, 130, -signal.SIGINT):
        assert said.splitlines()[-1].startswith("error: "), said
