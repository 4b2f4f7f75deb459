"""Importing the package, and asking the command line for help, must stay cheap."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "hivemind", "numpy", "scipy")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, nesa_node; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert not set(HEAVY) & set(done.stdout.split())
