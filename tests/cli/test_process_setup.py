from __future__ import annotations

import subprocess
import sys

import pytest

from nesa_node.cli.process_setup import OPENMP_SPIN_COUNT, limit_openmp_spinning


def test_idle_threads_sleep_soon() -> None:
    environment = {"PATH": "/bin"}
    limit_openmp_spinning(environment)
    assert environment == {"PATH": "/bin", "GOMP_SPINCOUNT": str(OPENMP_SPIN_COUNT)}


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "x")])
def test_what_a_user_has_set_stays(name: str, value: str) -> None:
    environment = {name: value}
    limit_openmp_spinning(environment)
    assert environment == {name: value}


def test_it_needs_no_torch_and_commands_have_not_loaded_it_before() -> None:
    """OpenMP reads it when torch comes."""
    words = (
        "import sys, nesa_node.cli.app, nesa_node.cli.process_setup; print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", words], check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["False"]
