"""A machine's figures: measured again where other processes ran, kept where none did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nesa_node.engine.model import machine_figures
from nesa_node.engine.model.machine_figures import MachineFigures, measure_once
from nesa_node.server.pool import figures as pool_figures
from nesa_node.server.pool.figures import DeviceFigures
from nesa_node.topology.roofline import WeightFigures

CPU = torch.device("cpu")


def figures(rate: float, others_share: float) -> MachineFigures:
    return MachineFigures({"int8": WeightFigures(0.0, rate, 1e12)}, others_share)


class Measurements:
    """Measurements in turn, each with the share of the cores that others used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *found: MachineFigures) -> None:
        self.left = list(found)
        monkeypatch.setattr(machine_figures, "_measure_with_load", lambda _: self.left.pop(0))


def test_a_quiet_measurement_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Measurements(monkeypatch, figures(1e9, 0.05), figures(2e9, 0.0))
    assert measure_once(CPU, 1, tmp_path) == measure_once(CPU, 1, tmp_path) == figures(1e9, 0.05)
    assert measure_once(CPU, 2, tmp_path) == figures(2e9, 0.0), "other threads, other figures"
    assert made.left == []


def test_a_busy_measurement_is_repeated_and_the_quietest_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Measurements(monkeypatch, figures(1e8, 0.5), figures(1e7, 0.8), figures(1e9, 0.1))
    found = [measure_once(CPU, 1, tmp_path).kinds["int8"].read_bytes_per_s for _ in range(4)]
    assert found == [1e8, 1e8, 1e9, 1e9]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"kinds": 3}', '{"kinds": {}, "x": 1}', "nul"]
)
def test_an_unreadable_file_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    Measurements(monkeypatch, figures(1e9, 0.0), figures(2e9, 0.0))
    measure_once(CPU, 1, tmp_path)
    [path] = tmp_path.glob("*.json")
    path.write_text(content)
    assert measure_once(CPU, 1, tmp_path) == figures(2e9, 0.0)


async def test_a_device_is_measured_until_the_machine_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool_figures, "AGAIN_INTERVAL_S", 0.01)
    monkeypatch.setattr(pool_figures, "QUIET_SHARE", 1.0)
    kind = {"block_overhead_s": 0.0, "read_bytes_per_s": 1e9, "flop_per_s": 1e12}
    device = DeviceFigures("cpu", 1, tmp_path)
    runs = tmp_path / "runs"
    script = f"echo x >> {runs}; n=$(wc -l < {runs}); r=$([ $n -ge 3 ] && echo true || echo false)"
    said = json.dumps({"kinds": {"int8": kind}}).replace('"', '\\"')
    script += f'; echo "{said[:-1]}, \\"are_quiet\\": $r}}"'
    device._argv = ("sh", "-c", script)
    await device.measure()
    assert device.kinds["int8"].read_bytes_per_s == 1e9
    free = iter([False, True, True])
    await device.measure_until_quiet(lambda: next(free))
    assert runs.read_text().split() == ["x"] * 3


async def test_a_failed_measurement_leaves_what_was_known(tmp_path: Path) -> None:
    device = DeviceFigures("cpu", 1, tmp_path)
    device._argv = ("false",)
    await device.measure()
    await device.wait()
    assert device.kinds == {}
    await device.measure_until_quiet(lambda: True)
