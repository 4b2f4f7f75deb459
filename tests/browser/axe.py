"""Accessibility checks by axe-core, which is fetched for the tests and never shipped."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

VERSION = "4.14.1"
_KEPT = Path(__file__).parents[2] / "build" / f"axe-core-{VERSION}.js"
_FETCH_S = 40


def axe_source() -> str:
    """Skips the test where it is neither kept nor to be had."""
    if not _KEPT.exists():
        _KEPT.parent.mkdir(exist_ok=True)
        command = ["npm", "pack", f"axe-core@{VERSION}", "--silent"]
        environment = {**os.environ, "npm_config_cache": str(_KEPT.parent / "npm")}
        try:
            subprocess.run(
                [*command, "--pack-destination", str(_KEPT.parent)],
                check=True,
                capture_output=True,
                timeout=_FETCH_S,
                env=environment,
            )
        except (OSError, subprocess.SubprocessError):
            pytest.skip(f"axe-core {VERSION} is not here, and npm cannot fetch it")
        packed = _KEPT.parent / f"axe-core-{VERSION}.tgz"
        with tarfile.open(packed) as archive:
            source = archive.extractfile("package/axe.min.js")
            assert source is not None
            _KEPT.write_bytes(source.read())
        packed.unlink()
    return _KEPT.read_text(encoding="utf-8")


def violations(page: Page) -> list[str]:
    """What is serious or critical, with the elements that it is about."""
    page.evaluate(axe_source())
    found: Any = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']} ({each['impact']}): {[node['html'][:160] for node in each['nodes'][:4]]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
