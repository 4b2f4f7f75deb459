"""Figures of this machine's CPU, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nesa_node.engine.model import machine_figures
from nesa_node.engine.model.devices import MAX_PREFILL_TOKENS, compute_block_bytes
from nesa_node.engine.model.machine_figures import (
    MAX_FIGURES_AGE_S,
    QUIET_RUNS,
    WEIGHT_KINDS,
    MachineFigures,
    _BlockTimes,
    find_roofline,
    measure_once,
    read_figures,
)
from nesa_node.engine.weights.checkpoint import Checkpoint, open_folder
from nesa_node.topology.roofline import BlockWork, WeightFigures

CPU = torch.device("cpu")
FIGURES = MachineFigures(
    {"float32": WeightFigures(1e-3, 1e10, 1e12), "int8": WeightFigures(2e-3, 2e10, 2e12)},
    others_share=0.0,
    runs=QUIET_RUNS,
)


@pytest.mark.timeout(240)
def test_the_program_prints_figures_of_every_kind_of_weights(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "nesa_node.engine.model.machine_figures", "cpu", "1"]
    argv.append(str(tmp_path))
    run = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    said = json.loads(run.stdout)
    assert (said["runs"], said["are_complete"]) == (1, False)
    figures = {kind: WeightFigures(**each) for kind, each in said["kinds"].items()}
    assert figures.keys() == {kind for kind, *_ in WEIGHT_KINDS}
    for kind, each in figures.items():
        # Far outside of what any CPU does.
        assert 1e8 < each.read_bytes_per_s < 1e13, kind
        assert 1e8 < each.flop_per_s < 1e15, kind
        assert 0 <= each.block_overhead_s < 0.1, kind
        assert not each.overlaps, kind


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", False), ("cuda", True)])
def test_the_figures_are_those_of_the_device_that_was_timed(
    device: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights are read from caches at no cost unless other data passed through them."""
    true = WeightFigures(2e-4, 4e10, 1e12, overlaps, 5e-4)

    def measure(model: Checkpoint, dtype: torch.dtype, *_: object) -> _BlockTimes:
        parameters = sum(info.numel for info in model.tensors.values()) / model.num_blocks
        work = BlockWork(parameters * dtype.itemsize, 2 * parameters)
        cold_step_s = true.wakeup_s + model.num_blocks * true.block_s(work, 1)
        hot_s = true.block_s(work, 1) if overlaps else true.block_overhead_s
        prefill_s = true.block_s(work, MAX_PREFILL_TOKENS)
        return _BlockTimes(work.read_bytes, hot_s, prefill_s, cold_step_s, true.read_bytes_per_s)

    monkeypatch.setattr(machine_figures, "_measure_model", measure)
    models = [machine_figures._write_model(tmp_path / f"{size}", size) for size in (128, 1024)]
    found = machine_figures._measure_kind(models, torch.float32, "none", torch.device(device))
    assert asdict(found) == pytest.approx(asdict(true))


def _stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a measurement of `FIGURES` leaves."""
    monkeypatch.setattr(machine_figures, "_measure_with_load", lambda _: FIGURES)
    assert measure_once(CPU, torch.get_num_threads(), folder) == FIGURES
    (path,) = folder.glob("*.json")
    return path


def test_a_node_finds_the_roofline_of_its_blocks_without_measuring(
    tmp_path: Path, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_folder(tiny("llama"))

    def found(**changes: object) -> object:  # untyped, so that one call can change any of them
        asked = {"dtype": torch.float32, "quant_type": "none", "device": CPU} | changes
        return find_roofline(checkpoint, folder=tmp_path, **asked)  # type: ignore[arg-type]

    assert found() is None
    path = _stored(tmp_path, monkeypatch)
    os.utime(path, (0, 0))
    sizes = compute_block_bytes(checkpoint, torch.float32)
    plain = find_roofline(
        checkpoint, dtype=torch.float32, quant_type="none", device=CPU, folder=tmp_path
    )
    assert plain is not None
    assert plain.figures == FIGURES.kinds["float32"]
    assert plain.work.read_bytes == pytest.approx(sum(sizes) / len(sizes))
    assert plain.work.flop == pytest.approx(2 * sum(sizes) / 4 / len(sizes))
    small = find_roofline(
        checkpoint, dtype=torch.float32, quant_type="int8", device=CPU, folder=tmp_path
    )
    assert small is not None
    assert small.figures == FIGURES.kinds["int8"]
    assert small.work.read_bytes < 0.5 * plain.work.read_bytes
    assert small.work.flop == plain.work.flop
    assert found(dtype=torch.float16) is None


def test_an_old_or_broken_file_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _stored(tmp_path, monkeypatch)
    threads = torch.get_num_threads()
    newer = MachineFigures({"float32": WeightFigures(1.0, 1.0, 1.0)}, 0.0, QUIET_RUNS)
    monkeypatch.setattr(machine_figures, "_measure_with_load", lambda _: newer)
    assert measure_once(CPU, threads, tmp_path) == FIGURES
    old = json.dumps({kind: asdict(each) for kind, each in FIGURES.kinds.items()})
    for text in ("", "{", "[]", '{"kinds": 3}', '{"kinds": {"float32": {"speed": 1}}}', old):
        path.write_text(text)
        assert read_figures(CPU, threads, tmp_path) is None
        assert measure_once(CPU, threads, tmp_path) == newer
    path.write_text(FIGURES.as_json())
    then = path.stat().st_mtime - MAX_FIGURES_AGE_S - 10
    os.utime(path, (then, then))
    assert measure_once(CPU, threads, tmp_path) == newer


def _measuring(monkeypatch: pytest.MonkeyPatch, *found: tuple[float, float]) -> None:
    """Measurements in turn: a rate, and the share of the cores that other processes used."""
    left = iter(found)

    def measure(_: torch.device) -> MachineFigures:
        rate, others_share = next(left)
        return MachineFigures({"int8": WeightFigures(0.0, rate, 1e12)}, others_share)

    monkeypatch.setattr(machine_figures, "_measure_with_load", measure)


def _rates(folder: Path, *threads: int) -> list[float]:
    return [measure_once(CPU, each, folder).kinds["int8"].read_bytes_per_s for each in threads]


def test_the_slowest_of_three_quiet_measurements_is_kept_for_its_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _measuring(monkeypatch, (3e9, 0.05), (2e9, 0.0), (9e9, 0.0), (1e9, 0.0), (4e9, 0.0))
    assert _rates(tmp_path, 1, 1, 2, 1, 1, 2) == [3e9, 2e9, 9e9, 1e9, 1e9, 4e9]


def test_a_busy_measurement_is_repeated_and_the_quietest_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _measuring(monkeypatch, (1e8, 0.5), (1e7, 0.8), (1e9, 0.1), (1e7, 0.5), (2e9, 0.0), (3e9, 0.0))
    assert _rates(tmp_path, *[1] * 7) == [1e8, 1e8, 1e9, 1e9, 1e9, 1e9, 1e9]


def test_processes_that_ask_at_once_share_one_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also on a busy machine, where each would take a minute."""
    together = threading.Barrier(4)
    measured: list[torch.device] = []

    def measure(device: torch.device) -> MachineFigures:
        measured.append(device)
        time.sleep(0.1)
        return MachineFigures({"int8": WeightFigures(0.0, 1e9, 1e12)}, others_share=0.9)

    monkeypatch.setattr(machine_figures, "_measure_with_load", measure)

    def ask(_: int) -> list[float]:
        together.wait()
        return _rates(tmp_path, 1)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == [[1e9]] * 4
    assert len(measured) == 1
    _rates(tmp_path, 1)
    assert len(measured) == 2, "a later one is another"


def test_of_two_measurements_the_slower_figures_count() -> None:
    one, other = WeightFigures(1e-3, 1e10, 1e12, True, 2e-3), WeightFigures(2e-3, 2e10, 1e11, True)
    assert one.slower(other) == other.slower(one) == WeightFigures(2e-3, 1e10, 1e11, True, 2e-3)
