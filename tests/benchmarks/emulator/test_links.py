from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest

from benchmarks.emulator.links import LEAST_QUEUE_BYTES, Line, Link

TICK_S = 2**-17
"""What one byte takes; a power of two, so that sums of it are exact."""


def brute_force(
    packets: list[tuple[int, int]], *, queue_bytes: int, latency_ticks: int
) -> list[int | None]:
    """A line that sends one byte per tick: when each packet (tick, bytes) arrives, if it does."""
    arrivals: list[int | None] = [None] * len(packets)
    waiting: deque[list[int]] = deque()
    tick, following = 0, 0
    while following < len(packets) or waiting:
        while following < len(packets) and packets[following][0] == tick:
            size, held = packets[following][1], sum(left for _, left in waiting)
            if not held or held + size <= queue_bytes:
                waiting.append([following, size])
            following += 1
        tick += 1
        if waiting:
            waiting[0][1] -= 1
            if not waiting[0][1]:
                arrivals[waiting.popleft()[0]] = tick + latency_ticks
    return arrivals


@pytest.mark.parametrize("seed", range(20))
def test_line_sends_byte_by_byte_and_drops_what_its_queue_cannot_hold(seed: int) -> None:
    rng = Random(seed)
    ticks = sorted(rng.randrange(3000) for _ in range(60))
    packets = [(tick, rng.randrange(1, 120)) for tick in ticks]
    link = Link(
        bandwidth_mbit_per_s=2**17 / 125_000, latency_ms=800 * TICK_S * 1000, queue_bytes=300
    )
    line = Line(link, Random(0))
    dues = [line.send(tick * TICK_S, size) for tick, size in packets]
    expected = brute_force(packets, queue_bytes=300, latency_ticks=800)
    assert [None if due is None else round(due / TICK_S, 3) for due in dues] == expected
    assert line.overflowed == expected.count(None)
    assert line.packets == len(packets) - line.overflowed
    assert 0 < line.overflowed < 30, "the load is meant to overflow the queue now and then"


def test_link_without_limits_delivers_after_its_latency() -> None:
    line = Line(Link(latency_ms=25, queue_bytes=1), Random(0))
    assert [line.send(at, 10**9) for at in (1.0, 1.0, 2.0)] == [1.025, 1.025, 2.025]


def test_idle_line_takes_what_is_longer_than_its_queue() -> None:
    line = Line(Link(bandwidth_mbit_per_s=8, queue_bytes=100), Random(0))
    assert line.send(0, 1000) == pytest.approx(0.001)
    assert line.send(0.0009, 1000) is None
    assert line.send(0.001, 1000) == pytest.approx(0.002)


def test_jitter_delays_within_its_bounds_and_reorders_nothing() -> None:
    line = Line(Link(latency_ms=10, jitter_ms=4), Random(1))
    sent = [n * 0.0005 for n in range(2000)]
    dues = [line.send(at, 100) or 0.0 for at in sent]
    late_ms = [(due - at) * 1000 for due, at in zip(dues, sent, strict=True)]
    assert dues == sorted(dues)
    assert 10 <= min(late_ms) < 11
    assert 13.5 < max(late_ms) <= 14


def test_loss_is_by_chance_but_repeats_with_its_seed() -> None:
    def arrived(seed: int) -> list[bool]:
        line = Line(Link(loss=0.1), Random(seed))
        fates = [line.send(n, 100) is not None for n in range(5000)]
        assert line.lost == fates.count(False)
        return fates

    assert arrived(1) == arrived(1) != arrived(2)
    assert 400 < arrived(1).count(False) < 600


def test_lost_packets_take_their_time_on_the_line() -> None:
    line = Line(Link(bandwidth_mbit_per_s=8, loss=1.0), Random(0))
    assert line.send(0, 1000) is None
    line.link = Link(bandwidth_mbit_per_s=8)
    assert line.send(0, 1000) == pytest.approx(0.002)


def test_link_that_is_down_delivers_nothing_and_keeps_what_is_under_way_in_order() -> None:
    line = Line(Link(latency_ms=200), Random(0))
    assert line.send(1.0, 100) == 1.2
    line.link = Link(latency_ms=200, up=False)
    assert line.send(1.05, 100) is None
    line.link = Link(latency_ms=0)
    assert line.send(1.1, 100) == 1.2, "not before what was sent earlier"
    assert line.send(1.3, 100) == 1.3


def test_default_queue_holds_a_round_trip_of_the_line() -> None:
    assert Link(bandwidth_mbit_per_s=10).queue_limit_bytes == LEAST_QUEUE_BYTES
    assert Link(bandwidth_mbit_per_s=1000, latency_ms=100).queue_limit_bytes == 25_000_000


@pytest.mark.parametrize(
    "wrong", [{"latency_ms": -1}, {"jitter_ms": -1}, {"loss": 1.1}, {"bandwidth_mbit_per_s": 0}]
)
def test_impossible_links_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"above 0|at least 0"):
        Link(**wrong)
