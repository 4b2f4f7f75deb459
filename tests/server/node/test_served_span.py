"""When a node measures itself again, by a made-up clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.engine.model.devices import MeasurementCancelled, SpanThroughput
from nesa_node.server.node import served_span as speed
from nesa_node.server.node.served_span import RemeasurePolicy, keep_speed_current, speeds_differ
from nesa_node.server.scheduler.batch import open_executor


def test_the_figure_of_the_start_is_measured_again_as_soon_as_it_may() -> None:
    policy = RemeasurePolicy(0.0)
    assert not policy.is_due(2.0, 5.0)
    assert not policy.is_due(2.0, 29.0)
    assert policy.is_due(2.0, 34.0)


def test_as_long_as_nothing_changes_it_is_measured_every_ten_minutes() -> None:
    policy = RemeasurePolicy(0.0)
    policy.record_measurement(1.0, 30.0)
    for now in range(35, 630, 5):
        assert not policy.is_due(1.0 + 0.3 * (now % 2), float(now))
    assert policy.is_due(1.0, 630.0)


@pytest.mark.parametrize("cores", [0.0, 2.0])
def test_two_looks_that_find_another_machine_are_enough(cores: float) -> None:
    policy = RemeasurePolicy(0.0)
    policy.record_measurement(1.0, 30.0)
    assert not policy.is_due(cores, 100.0)
    assert policy.is_due(cores, 105.0)
    policy.record_measurement(cores, 106.0)
    assert not policy.is_due(1.0, 111.0)
    assert not policy.is_due(1.0, 116.0), "not again so soon"
    assert policy.is_due(1.0, 136.0)


def test_one_look_or_the_node_s_own_steps_are_no_change() -> None:
    policy = RemeasurePolicy(0.0)
    policy.record_measurement(1.0, 30.0)
    assert not policy.is_due(0.0, 100.0)
    assert not policy.is_due(1.0, 105.0)
    assert not policy.is_due(0.0, 110.0)
    policy.discard_sample()
    assert not policy.is_due(0.0, 115.0)


def test_small_differences_are_no_news() -> None:
    assert not speeds_differ(SpanThroughput(100, 10), SpanThroughput(95, 10.5))
    assert speeds_differ(SpanThroughput(100, 10), SpanThroughput(80, 10))
    assert speeds_differ(SpanThroughput(100, 10), SpanThroughput(100, 3))


async def test_what_an_idle_node_measures_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, measured, loop = [], asyncio.Event(), asyncio.get_running_loop()

    def measure(blocks: object, *, stop: Any) -> SpanThroughput:
        asked.append(stop())
        if len(asked) == 1:
            raise MeasurementCancelled
        loop.call_soon_threadsafe(measured.set)
        return SpanThroughput(200, 20)

    monkeypatch.setattr(speed, "measure_throughput", measure)
    monkeypatch.setattr(speed, "SAMPLE_INTERVAL_S", 0.01)
    monkeypatch.setattr(speed, "MIN_MEASURE_INTERVAL_S", 0.0)
    announcer: Any = SimpleNamespace(throughput=SpanThroughput(30, 3))
    async with open_executor() as executor, keep_speed_current(object(), executor, announcer):  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            await measured.wait()
            await executor.run(int)
    assert announcer.throughput == SpanThroughput(200, 20)
    assert asked[0] is False


class BusyExecutor:
    """Has run a session's step at each look."""

    has_queue = False

    def __init__(self) -> None:
        self.jobs: list[object] = []
        self.looks = 0
        self.seen = asyncio.Event()

    @property
    def idle_s(self) -> float:
        self.looks += 1
        if self.looks == 10:
            self.seen.set()
        return 0.0

    async def run(self, job: Any) -> SpanThroughput:
        self.jobs.append(job)
        self.seen.set()
        return SpanThroughput(200, 20)


async def test_a_node_that_serves_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SAMPLE_INTERVAL_S", 0.01)
    monkeypatch.setattr(speed, "MAX_MEASURE_INTERVAL_S", 0.0)
    executor: Any = BusyExecutor()
    announcer: Any = SimpleNamespace(throughput=SpanThroughput(30, 3))
    blocks: Any = object()
    async with keep_speed_current(blocks, executor, announcer):
        await asyncio.wait_for(executor.seen.wait(), 10)
    assert executor.jobs == []
