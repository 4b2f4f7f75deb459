"""Figures of this machine's CPU, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nesa_node.engine.model.machine_figures import WEIGHT_KINDS
from nesa_node.topology.roofline import WeightFigures


@pytest.mark.timeout(240)
def test_the_program_prints_figures_of_every_kind_of_weights(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "nesa_node.engine.model.machine_figures", "cpu", "1"]
    argv.append(str(tmp_path))
    run = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    again = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert again.stdout == run.stdout, "measured again within a day"
    figures = {kind: WeightFigures(**each) for kind, each in json.loads(run.stdout).items()}
    assert figures.keys() == {kind for kind, *_ in WEIGHT_KINDS}
    for kind, each in figures.items():
        # Far outside of what any CPU does.
        assert 1e8 < each.read_bytes_per_s < 1e13, kind
        assert 1e8 < each.flop_per_s < 1e15, kind
        assert 0 <= each.block_overhead_s < 0.1, kind
        assert not each.overlaps, kind
