"""A place of its own for each client: together they pin each other down.

They are made once, under `build/clients`, with the versions that `VERSIONS.md` records.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S = 400

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "langchain": ("langchain-openai==1.7.3",),
    "llm": ("llm==0.36",),
    "litellm": ("litellm==1.106.2",),
}
NPM = ("openai@7.57.0", "@continuedev/cli@1.5.47")


def python_of(client: str) -> Path:
    """The Python of this client's environment; skips the test where it cannot be made."""
    wanted = " ".join(PACKAGES[client])
    folder = FOLDER / client
    with _lock(client):
        if not _is_done(folder, wanted):
            venv.create(folder, with_pip=True, clear=True)
            _install([folder / "bin" / "python", "-m", "pip", "install", "-q", *PACKAGES[client]])
            (folder / ".done").write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


def node_folder() -> Path:
    """A folder with the npm packages in it."""
    wanted = " ".join(NPM)
    folder = FOLDER / "npm"
    with _lock("npm"):
        if not _is_done(folder, wanted):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
            _install(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *NPM])
            (folder / ".done").write_text(wanted, encoding="utf-8")
    return folder


def run_script(
    command: Sequence[str | Path], env: Mapping[str, str], *, as_json: bool = True
) -> Any:
    """What a script prints, read as JSON; run with no more of our environment than it needs."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command,
        env={**kept, "NN_TEST_RUN": os.environ["NN_TEST_RUN"], **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if as_json else done.stdout


def _is_done(folder: Path, wanted: str) -> bool:
    done = folder / ".done"
    return done.exists() and done.read_text(encoding="utf-8") == wanted


def _lock(name: str) -> FileLock:
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FileLock(FOLDER / f".{name}.lock")


def _install(command: Sequence[str | Path]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except OSError as error:
        pytest.skip(f"{command[0]} cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"cannot be installed here: {done.stderr.strip()[-300:]}")
