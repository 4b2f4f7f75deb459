"""Steps on other numbers of threads: set for the calling thread, put back, and the same results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nesa_node.core.ids import Span
from nesa_node.engine.kernels import threads as module
from nesa_node.engine.kernels.machine_code import set_num_threads
from nesa_node.engine.kernels.threads import (
    IdleCores,
    ThreadController,
    ThreadTuner,
    cpu_quota,
    list_thread_counts,
)
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import forward, new_row, open_local
from tests.engine.tiny_models import save_tiny_model


def load(models_dir: Path) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    return load_blocks(checkpoint, Span(1, 4), dtype=torch.float32, device="cpu")


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_is_fixed", False)
    monkeypatch.setattr(module, "cpu_quota", lambda: 1 << 16)
    monkeypatch.setattr(module, "idle_cores", lambda: 8.0)
    before = torch.get_num_threads()
    set_num_threads(3)
    yield
    set_num_threads(before)


def test_all_numbers_are_tried_and_torch_s_own_comes_back() -> None:
    threads, used = ThreadController(), set()
    for _ in range(200):
        used.add(threads.run(torch.get_num_threads, 1))
        assert torch.get_num_threads() == 3
    assert used >= {2, 3}
    assert threads.is_settled(1)


def test_it_comes_back_after_an_error_which_counts_for_nothing() -> None:
    threads = ThreadController()
    before = threads.run(torch.get_num_threads, 1)
    for _ in range(50):
        with pytest.raises(ZeroDivisionError):
            threads.run(lambda: 1 // 0, 1)
        assert torch.get_num_threads() == 3
    assert threads.run(torch.get_num_threads, 1) == before


def test_other_threads_keep_their_number() -> None:
    seen: list[int] = []

    def job() -> None:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()

    expected: list[int] = []
    plain = threading.Thread(target=lambda: expected.append(torch.get_num_threads()))
    plain.start()
    plain.join()
    threads = ThreadController()
    for _ in range(20):
        threads.run(job, 1)
    assert set(seen) == set(expected)


def test_a_fixed_number_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_fixed", True)
    threads = ThreadController()
    assert {threads.run(torch.get_num_threads, 1) for _ in range(100)} == {3}
    assert threads.is_settled(1)


def test_a_size_begins_with_what_was_found_for_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = ThreadController()
    assert threads.run(torch.get_num_threads, 1) == 2
    monkeypatch.setattr(ThreadTuner, "is_settled", property(lambda _: True))
    monkeypatch.setattr(ThreadTuner, "threads", property(lambda _: 1))
    threads._nearest_threads((8, 0))
    assert threads._nearest_threads((8, 0)) == 1


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_no_bit_of_a_decode_depends_on_the_number_of_threads(rows: int, models_dir: Path) -> None:
    """Whatever a node tries while it serves, a session's tokens stay those of one thread.

    Prefills are torch's, whose last bits depend on its threads as they always did.
    """
    blocks = load(models_dir)
    hidden_RD = torch.randn(rows, blocks.hidden_size)
    outputs = []
    for count in (1, 2, 3):
        set_num_threads(count)
        blocks.threads = ThreadController()
        promise = blocks.new_pool(32 * rows).reserve(rows)
        tables = [promise.new_table() for _ in range(rows)]
        for table in tables:
            table.reserve(8)
        runs = [RowChunk(table, 1) for table in tables]
        outputs.append([blocks.forward(hidden_RD, runs) for _ in range(8)])
    for other in outputs[1:]:
        for one, two in zip(outputs[0], other, strict=True):
            assert torch.equal(one, two)


def test_steps_of_one_row_are_the_same_while_threads_change(models_dir: Path) -> None:
    blocks, fixed = (load(models_dir) for _ in range(2))
    row, other_row = new_row(blocks), new_row(fixed)
    for _ in range(40):
        hidden_1D = torch.randn(1, blocks.hidden_size)
        set_num_threads(3)
        ours = forward(blocks, hidden_1D, row)
        set_num_threads(1)
        assert torch.equal(ours, forward(fixed, hidden_1D, other_row))


def test_counts_are_powers_of_two_and_all() -> None:
    assert list_thread_counts(1) == [1]
    assert list_thread_counts(2) == [1, 2]
    assert list_thread_counts(12) == [1, 2, 4, 8, 12]


def test_idle_cores_are_those_of_the_time_since_it_was_asked() -> None:
    now, idle_s = [0.0], [100.0]
    cores = IdleCores(lambda: idle_s[0], lambda: now[0])
    now[0], idle_s[0] = 10.0, 115.0
    assert cores() == 1.5
    now[0], idle_s[0] = 10.1, 200.0
    assert cores() == 1.5, "too soon to say anything else"
    now[0], idle_s[0] = 20.0, 115.0
    assert cores() == 0.0


def test_the_quota_of_the_nearest_and_of_all_groups_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(module, "_read_own_group", lambda _: "pod/box")
    (tmp_path / "pod" / "box").mkdir(parents=True)
    cpu_quota.cache_clear()
    assert cpu_quota() == 1 << 16
    (tmp_path / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    cpu_quota.cache_clear()
    assert cpu_quota() == 2
    cpu_quota.cache_clear()


def test_quotas_of_version_1_count_and_minus_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(module, "_read_own_group", lambda controller: "box" if controller else "")
    box = tmp_path / "cpu" / "box"
    box.mkdir(parents=True)
    for folder, quota in ((box, -1), (tmp_path / "cpu", 250_000)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    cpu_quota.cache_clear()
    assert cpu_quota() == 3
    (box / "cpu.cfs_quota_us").write_text("100000\n")
    cpu_quota.cache_clear()
    assert cpu_quota() == 1
    cpu_quota.cache_clear()


def test_a_process_is_in_one_group_of_each_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "9:name=systemd:/\n2:cpu,cpuacct:/docker/a:b\n1:cpuset:/other\n0::/pod/box\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert module._read_own_group("cpu") == "docker/a:b"
    assert module._read_own_group("") == "pod/box"
    assert module._read_own_group("memory") == ""


def test_idle_time_is_that_of_the_cores_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [SimpleNamespace(idle=10.0**core) for core in range(4)]
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: times)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3})
    assert module._read_idle_s() == 1010.0
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 9})
    assert module._read_idle_s() == 1111.0
