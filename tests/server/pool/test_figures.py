"""When a machine is measured again, and what a failure leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nesa_node.server.pool import figures as pool_figures
from nesa_node.server.pool.figures import DeviceFigures


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
