"""When a machine is measured, and what a failure leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from nesa_node.engine.kernels.threads import IdleCores
from nesa_node.engine.model import machine_figures
from nesa_node.engine.model.machine_figures import QUIET_RUNS, MachineFigures, measure_once
from nesa_node.server.pool import figures as pool_figures
from nesa_node.server.pool.figures import DeviceFigures
from nesa_node.topology.roofline import WeightFigures
from tests.swarm.local_swarm import eventually

CPU = torch.device("cpu")
KIND = {"block_overhead_s": 0.0, "read_bytes_per_s": 1e9, "flop_per_s": 1e12}


@pytest.fixture(autouse=True)
def looks_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_figures, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pool_figures, "MAX_INTERVAL_S", 0.01)
    monkeypatch.setattr(pool_figures, "QUIET_INTERVAL_S", 0.01)
    monkeypatch.setattr(pool_figures, "QUIET_SHARE", 1.0)


def script(folder: Path, last_run: int) -> tuple[str, ...]:
    """A measurement that counts its runs, and whose run of this number completes the figures."""
    runs = folder / "runs"
    said = json.dumps({"kinds": {"int8": KIND}}).replace('"', '\\"')
    return (
        "sh",
        "-c",
        f"echo x >> {runs}; n=$(wc -l < {runs}); "
        f"r=$([ $n -ge {last_run} ] && echo true || echo false); "
        f'echo "{said[:-1]}, \\"are_complete\\": $r}}"',
    )


def count_runs(folder: Path) -> int:
    return len((folder / "runs").read_text().split())


async def test_a_device_is_measured_until_its_figures_are_complete(tmp_path: Path) -> None:
    device = DeviceFigures(CPU, 1, tmp_path)
    device._argv = script(tmp_path, last_run=3)
    await device.measure_first()
    assert device.kinds["int8"].read_bytes_per_s == 1e9
    free = iter([False, True, True])
    await device.measure_until_complete(lambda: next(free))
    assert count_runs(tmp_path) == 3


async def test_the_first_measurement_waits_for_a_quiet_machine_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pool_figures, "QUIET_SHARE", 0.5)
    monkeypatch.setattr(pool_figures, "MAX_FIRST_WAIT_S", 1e9)
    shares = iter([0.9, 0.6, 0.4])
    monkeypatch.setattr(IdleCores, "busy_share", lambda _: next(shares))
    device = DeviceFigures(CPU, 1, tmp_path)
    device._argv = script(tmp_path, last_run=1)
    await device.measure_first()
    assert count_runs(tmp_path) == 1
    assert list(shares) == [], "measured at the first look at a quiet machine"
    monkeypatch.setattr(IdleCores, "busy_share", lambda _: 0.9)
    monkeypatch.setattr(pool_figures, "MAX_FIRST_WAIT_S", 0.1)
    busy = DeviceFigures(CPU, 1, tmp_path)
    busy._argv = script(tmp_path, last_run=9)
    await busy.measure_first()
    assert busy.kinds["int8"].read_bytes_per_s == 1e9


async def test_machines_of_one_computer_share_a_quiet_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def store(others_share: float, runs: int = QUIET_RUNS) -> None:
        found = MachineFigures({"int8": WeightFigures(0.0, 5e9, 1e12)}, others_share, runs)
        monkeypatch.setattr(machine_figures, "_measure_with_load", lambda _: found)
        measure_once(CPU, torch.get_num_threads(), tmp_path)

    waiting = DeviceFigures(CPU, None, tmp_path)
    waiting._argv = script(tmp_path, last_run=9)
    await waiting.measure_first()
    assert waiting.kinds["int8"].read_bytes_per_s == 1e9
    store(others_share=1.1)
    assert not waiting._read_quiet(), "measured beside other programs"
    store(others_share=0.0)
    await waiting.measure_until_complete(lambda: False)
    assert waiting.kinds["int8"].read_bytes_per_s == 5e9
    late = DeviceFigures(CPU, None, tmp_path)
    late._argv = ("false",)
    await late.measure_first()
    assert late.kinds == waiting.kinds
    other = DeviceFigures(CPU, torch.get_num_threads() + 1, tmp_path)
    assert not other._read_quiet(), "of another number of threads"


async def test_a_quiet_machine_is_measured_several_times_whichever_process_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = iter([5e9, 3e9, 4e9])

    def measure(_: object) -> MachineFigures:
        return MachineFigures({"int8": WeightFigures(0.0, next(rates), 1e12)}, 0.0)

    monkeypatch.setattr(machine_figures, "_measure_with_load", measure)
    measure_once(CPU, torch.get_num_threads(), tmp_path)
    looking = DeviceFigures(CPU, None, tmp_path)
    await looking.measure_first()
    assert looking.kinds["int8"].read_bytes_per_s == 5e9
    looks = 0

    def is_free() -> bool:
        """Another process measures at each second look."""
        nonlocal looks
        looks += 1
        if looks % 2 == 0:
            measure_once(CPU, torch.get_num_threads(), tmp_path)
        return False

    await looking.measure_until_complete(is_free)
    assert looking.kinds["int8"].read_bytes_per_s == 3e9
    assert looks == 4


async def test_a_measurement_that_is_ended_deletes_its_files(tmp_path: Path) -> None:
    files, temporary = tmp_path / "figures", tmp_path / "temporary"
    temporary.mkdir()
    device = DeviceFigures(CPU, 1, files)
    device._argv = ("env", f"TMPDIR={temporary}", *device._argv)
    measuring = asyncio.create_task(device.measure_first())

    async def has_begun() -> bool:
        return bool(list(temporary.glob("nesa-figures-*/*/model.safetensors")))

    await eventually(has_begun, 60)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert list(temporary.iterdir()) == []


async def test_a_failed_measurement_leaves_what_was_known(tmp_path: Path) -> None:
    device = DeviceFigures(CPU, 1, tmp_path)
    device._argv = ("false",)
    await device.measure_first()
    await device.wait()
    assert device.kinds == {}
    await device.measure_until_complete(lambda: True)
