"""The speed that a node announces: when it is measured again, by a made-up clock, and of what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from nesa_node.core.ids import Span
from nesa_node.engine.model.devices import MeasurementCancelled, SpanThroughput
from nesa_node.engine.model.machine_figures import MEASUREMENT_LOCK
from nesa_node.server.node import span_speed as speed
from nesa_node.server.node.served_span import DecoderSpan
from nesa_node.server.node.span_speed import RemeasurePolicy, keep_speed_current, speeds_differ
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.scheduler.scheduler import (
    MAX_TIMED_CONTEXT_TOKENS,
    MIN_DECODE_TIMES,
    DecodeTimes,
)


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


def test_a_served_speed_stands_until_the_machine_changes() -> None:
    policy = RemeasurePolicy(0.0)
    assert policy.may_use_served(5.0), "the first at once"
    policy.record_served(40.0)
    assert not policy.may_use_served(69.0)
    assert policy.may_use_served(70.0)
    for now in range(80, 300, 5):
        assert not policy.is_due(2.0, float(now)), "measured as the machine is"
    assert not policy.is_due(0.5, 300.0)
    assert policy.is_due(0.5, 305.0), "another program runs now"
    policy.record_served(310.0)
    assert policy.is_due(0.5, 910.0)


def test_small_differences_are_no_news() -> None:
    assert not speeds_differ(SpanThroughput(100, 10), SpanThroughput(96, 10.4))
    assert speeds_differ(SpanThroughput(100, 10), SpanThroughput(80, 10))
    assert speeds_differ(SpanThroughput(100, 10), SpanThroughput(100, 3))


SPAN = Span(2, 6)
BLOCKS: Any = SimpleNamespace(span=SPAN)
Measure = Callable[..., SpanThroughput]


def scheduler_of(executor: Any) -> Any:
    return SimpleNamespace(executor=executor, decode_times=DecodeTimes())


def queue_of(span: Span = SPAN, context: int = 9) -> Any:
    return SimpleNamespace(span=span, tables=[SimpleNamespace(length=context)])


def announcer_of() -> Any:
    return SimpleNamespace(throughput=SpanThroughput(30, 3))


@pytest.fixture
def _looking_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SAMPLE_INTERVAL_S", 0.01)
    monkeypatch.setattr(speed, "MIN_MEASURE_INTERVAL_S", 0.0)


def serve_nothing(announced: SpanThroughput) -> SpanThroughput | None:
    return None


@pytest.mark.usefixtures("_looking_at_once")
async def test_what_an_idle_node_measures_is_announced(tmp_path: Path) -> None:
    asked, measured, loop = [], asyncio.Event(), asyncio.get_running_loop()

    def measure(stop: Callable[[], bool]) -> SpanThroughput:
        asked.append(stop())
        if len(asked) == 1:
            raise MeasurementCancelled
        loop.call_soon_threadsafe(measured.set)
        return SpanThroughput(200, 20)

    announcer = announcer_of()
    async with (
        open_executor() as executor,
        keep_speed_current(
            executor, announcer, tmp_path, measure=measure, take_served=serve_nothing
        ),
        asyncio.timeout(10),
    ):
        await measured.wait()
        await executor.run(int)
    assert announcer.throughput == SpanThroughput(200, 20)
    assert asked[0] is False


@pytest.mark.usefixtures("_looking_at_once")
async def test_nodes_of_one_computer_measure_one_after_the_other(tmp_path: Path) -> None:
    measured, loop = asyncio.Event(), asyncio.get_running_loop()

    def measure(stop: Callable[[], bool]) -> SpanThroughput:
        loop.call_soon_threadsafe(measured.set)
        return SpanThroughput(200, 20)

    def keep(folder: Path) -> Any:
        return keep_speed_current(
            executor, announcer_of(), folder, measure=measure, take_served=serve_nothing
        )

    async with open_executor() as executor:
        folder = tmp_path / "cache"
        folder.mkdir()
        with FileLock(folder / MEASUREMENT_LOCK):
            async with keep(folder):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(measured.wait(), 0.5)
        async with keep(folder):
            await asyncio.wait_for(measured.wait(), 10)


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


@pytest.mark.usefixtures("_looking_at_once")
async def test_a_node_that_serves_announces_its_steps_and_does_not_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(speed, "MAX_MEASURE_INTERVAL_S", 0.0)
    executor: Any = BusyExecutor()
    scheduler, announcer = scheduler_of(executor), announcer_of()
    for number in range(20):
        scheduler.decode_times.record(queue_of(), 0.025 if number else 9.0)
    served: Any = SimpleNamespace(span=SPAN, blocks=BLOCKS, _scheduler=scheduler)
    async with DecoderSpan.keep_speed_current(served, announcer, tmp_path):
        await asyncio.wait_for(executor.seen.wait(), 10)
    assert executor.jobs == []
    # The mean, to which one outlier adds twice the median, and the prefill that was measured.
    step_s = (19 * 0.025 + 0.05) / 20
    assert announcer.throughput.prefill_tokens_per_s == 30, "as it was measured"
    assert announcer.throughput.decode_tokens_per_s == pytest.approx(1 / step_s)


def test_decode_times_are_those_of_one_span_and_short_contexts() -> None:
    times = DecodeTimes()
    for _ in range(MIN_DECODE_TIMES - 1):
        times.record(queue_of(), 1.0)
    assert times.take_mean_s(SPAN) is None, "too few"
    times.record(queue_of(context=MAX_TIMED_CONTEXT_TOKENS + 1), 5.0)
    assert times.take_mean_s(SPAN) is None, "a long context does not count"
    times.record(queue_of(), 1.0)
    assert times.take_mean_s(Span(2, 7)) is None
    assert times.take_mean_s(SPAN) == 1.0
    assert times.take_mean_s(SPAN) is None, "each once"
    for _ in range(MIN_DECODE_TIMES):
        times.record(queue_of(), 1.0)
    times.record(queue_of(Span(0, 4)), 3.0)
    assert times.take_mean_s(SPAN) is None, "the node has moved"
