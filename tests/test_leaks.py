"""The check that every test runs under must itself be able to fail."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.leaks import Leftovers


def test_an_orphaned_process_is_found_and_named(tmp_path: Path) -> None:
    before = Leftovers.now(tmp_path)
    starter = (
        "import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", starter], check=True)
    left = before.wait_until_gone(tmp_path, timeout_s=0.1)
    assert len(left) == 1
    assert "time.sleep(60)" in left[0]
    assert before.wait_until_gone(tmp_path, timeout_s=3) == []


def test_a_child_that_hides_the_mark_is_found(tmp_path: Path) -> None:
    before = Leftovers.now(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
    left = before.wait_until_gone(tmp_path, timeout_s=0)
    child.wait(10)
    assert [line.split(":")[0] for line in left] == [f"process {child.pid}"]


def test_a_listening_port_and_a_file_are_found(tmp_path: Path) -> None:
    before = Leftovers.now(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (tmp_path / "forgotten").touch()
        left = before.wait_until_gone(tmp_path, timeout_s=0)
    assert left == [
        f"listening port 127.0.0.1:{port}",
        f"temporary file {tmp_path / 'forgotten'}",
    ]
