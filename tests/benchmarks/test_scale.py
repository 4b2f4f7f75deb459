from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import scale


def _row(nodes: int) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.scale", str(nodes), "0"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=280)
    row: dict[str, float] = json.loads(done.stdout)
    return row


def test_a_small_swarm_is_measured_in_all_its_parts() -> None:
    row = scale.measure(60, seed=0)
    assert set(row["seconds"]) == set(scale.PARTS)
    assert 0 <= row["latency_gap"] < 1
    assert row["placed_latency_s"] <= row["chain_s"] * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_thousand_nodes_are_planned_in_ten_seconds_and_a_gigabyte() -> None:
    """Snapshot, homology by landmarks, plan and chain; CPU seconds, so that load does not count."""
    row = _row(5000)
    assert row["required_cpu_s"] < 10
    assert row["peak_mb"] < 1000
