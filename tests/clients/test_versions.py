"""What is said to be tested is what is tested."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tests.clients.environments import NPM, PACKAGES

RECORD = (Path(__file__).parent / "VERSIONS.md").read_text(encoding="utf-8")


def test_the_record_names_every_client_in_its_version() -> None:
    pinned = [package.split("==") for packages in PACKAGES.values() for package in packages]
    for name, number in pinned:
        assert f"| `{name}` | {number} |" in RECORD
    for name, number in [package.rsplit("@", 1) for package in NPM]:
        assert f"| `{name}` (npm, Node 20) | {number} |" in RECORD
    assert f"| `openai` (Python) | {version('openai')} |" in RECORD
