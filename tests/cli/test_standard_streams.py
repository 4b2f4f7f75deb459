"""Standard streams of another encoding, and without a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_app import nesa_node


@pytest.mark.parametrize(
    "interrupted",
    [
        "with process_setup.exit_on_interrupt(): os.kill(os.getpid(), signal.SIGINT)",
        "app.app = fail; app.main()",
    ],
    ids=["among imports", "in a command"],
)
def test_ctrl_c_ends_with_130_where_no_output_has_a_reader(interrupted: str) -> None:
    code = """
import os, signal
from nesa_node.cli import app, process_setup
def fail(*_, **__):
    raise KeyboardInterrupt
print("what was said before")
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code + interrupted],
        stdout=writer,
        stderr=writer,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        timeout=50,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 130


def test_an_output_that_is_not_utf_8_gets_every_character_in_some_way(tmp_path: Path) -> None:
    odd = {"PYTHONIOENCODING": "ascii", "XDG_STATE_HOME": str(tmp_path)}
    assert nesa_node("keys", "add", "café", env={**os.environ, **odd}).returncode == 0
    done = nesa_node("keys", "list", env={**os.environ, **odd})
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf\\xe9" in done.stdout
