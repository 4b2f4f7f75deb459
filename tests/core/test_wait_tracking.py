"""What is waited for, and which of it is worth telling."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.wait_tracking import (
    WaitStatus,
    WaitTracker,
    current_tracker,
    track_wait,
    untracked,
)

PEER = PeerId("12D3KooWabcdef")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_text_names_blocks_nodes_and_the_limit() -> None:
    wait = WaitStatus(what="room", since=1000, blocks=(Span(10, 20),), peers=(PEER,), limit_s=30)
    assert wait.text(1004) == "waiting for room: blocks 10:20, node …abcdef, 4 s of at most 30 s"
    assert wait.text(1031) == "waiting for room: blocks 10:20, node …abcdef, 31 s so far"
    assert WaitStatus(what="weights", since=1000).text(1002) == "waiting for weights: 2 s so far"


def test_text_tells_how_far_a_wait_is() -> None:
    clock = Clock()
    with WaitTracker(clock=clock).activate(), track_wait("a step") as wait:
        before = wait.status().key
        wait.progress = "block 2 of 30"
        assert wait.status().text(1004) == "waiting for a step: block 2 of 30, 4 s so far"
        assert wait.status().key == before


def test_time_is_that_of_the_innermost_wait() -> None:
    clock = Clock()
    waits = WaitTracker(clock=clock)
    with waits.activate():
        clock.now += 5
        with track_wait("a chain") as chain:
            clock.now += 1
            for _ in range(2):
                with track_wait("a step"):
                    clock.now += 10
            clock.now += 2
            chain.update("room")
            clock.now += 30
        clock.now += 100
    assert waits.seconds == {"a chain": 3, "a step": 20, "room": 30}
    assert waits.age_s == 158


def test_text_of_many_nodes_stays_short() -> None:
    peers = tuple(PeerId(f"peer-{number:06}") for number in range(50))
    text = WaitStatus(what="an answer", since=0, peers=peers).text(3)
    assert "nodes …000000 …000001 …000002 …000003 and 46 more" in text


def test_short_waits_are_not_told_and_the_youngest_long_one_is() -> None:
    clock = Clock()
    waits = WaitTracker(clock=clock)
    with waits.activate(), track_wait("a chain", limit_s=60):
        assert waits.slow_wait() is None
        clock.now += 1.5
        with track_wait("node a"):
            clock.now += 1
            assert (told := waits.slow_wait()) is not None
            assert told.what == "a chain"
            clock.now += 1
            assert (told := waits.slow_wait()) is not None
            assert told.what == "node a"
        assert (told := waits.slow_wait()) is not None
        assert told.what == "a chain"
    assert waits.slow_wait() is None


def test_wait_that_changes_keeps_its_beginning_and_counts_its_limit_from_there() -> None:
    clock = Clock()
    waits = WaitTracker(clock=clock)
    with waits.activate(), track_wait("a chain", limit_s=60) as wait:
        clock.now += 10
        wait.update("room", blocks=[Span(0, 4)], peers=[PEER], remaining_s=600)
        assert waits.slow_wait() == WaitStatus(
            what="room", since=1000, blocks=(Span(0, 4),), peers=(PEER,), limit_s=610
        )
        wait.restart()
        assert waits.slow_wait() is None


def test_attempts_at_the_same_are_one_wait_whatever_time_is_left() -> None:
    clock = Clock()
    subjects = []
    with WaitTracker(clock=clock).activate(), track_wait("a chain", limit_s=60) as wait:
        for peer, left_s in ((PEER, 50.0), (PEER, 48.0), (PeerId("another"), 48.0)):
            wait.update("room", blocks=[Span(0, 4)], peers=[peer], remaining_s=left_s)
            subjects.append(wait.status().key)
    assert subjects[0] == subjects[1] != subjects[2]


def test_waits_reach_whoever_made_them_through_tasks_and_threads() -> None:
    clock = Clock()
    request = WaitTracker(clock=clock)
    told: list[str] = []

    def look() -> None:
        clock.now += 3
        for waits in (request, current_tracker()):
            wait = None if waits is None else waits.slow_wait()
            told.append("-" if wait is None else wait.what)

    def thread() -> None:
        with (
            WaitTracker(outer=current_tracker(), clock=clock).activate(),
            track_wait("in a thread"),
        ):
            look()

    async def task() -> None:
        with track_wait("in a task"):
            look()

    async def run() -> None:
        await asyncio.create_task(task())
        with untracked():
            await asyncio.create_task(task())

    with request.activate():
        working = threading.Thread(target=copy_context().run, args=(thread,))
        working.start()
        working.join()
        asyncio.run(run())
    assert told == ["in a thread", "in a thread", "in a task", "in a task", "-", "-"]
    assert request.slow_wait() is None


def test_wait_without_a_surface_costs_nothing_and_says_nothing() -> None:
    with track_wait("nobody listens") as wait:
        wait.restart()
    assert current_tracker() is None
