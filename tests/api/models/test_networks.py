"""Networks that a gateway offers are opened once, and closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nesa_node.api.models.networks import NetworkRegistry
from nesa_node.client.model.loop_thread import LoopThread
from nesa_node.core.errors import ConfigError, SwarmError, UnsupportedModelError
from nesa_node.web.problem import HttpProblem


class FakePipeline:
    def __init__(self) -> None:
        self.closed = 0
        self.running = self.most_running = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args

    def close(self) -> None:
        self.closed += 1


async def test_requests_that_leave_while_it_opens_share_one_opening() -> None:
    opened: list[FakePipeline] = []
    may_open = threading.Event()

    def open_pipeline(task: str, name: str) -> FakePipeline:
        assert may_open.wait(10)
        opened.append(FakePipeline())
        return opened[-1]

    registry = NetworkRegistry(("org/a",), open_pipeline)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(registry.run("a", "task", lambda each: each), 0.05)
    may_open.set()
    assert await registry.run("a", "task", lambda each: each("x")) == ("x",)
    await registry.close()
    assert [each.closed for each in opened] == [1]


async def test_a_network_that_fits_no_task_is_tried_once_and_a_swarm_again() -> None:
    tried: list[str] = []

    def open_pipeline(task: str, name: str) -> FakePipeline:
        tried.append(task)
        if task == "other":
            raise UnsupportedModelError("it is for something else")
        if len(tried) < 4:
            raise SwarmError("no node answers")
        return FakePipeline()

    registry = NetworkRegistry(("a",), open_pipeline)
    for _ in range(2):
        with pytest.raises(HttpProblem, match="something else"):
            await registry.run("a", "other", lambda each: each)
    for _ in range(2):
        with pytest.raises(SwarmError):
            await registry.run("a", "task", lambda each: each)
    await registry.run("a", "task", lambda each: each)
    assert tried == ["other", "task", "task", "task"]
    await registry.close()


async def test_one_after_another_where_that_is_asked_for() -> None:
    registry = NetworkRegistry(("a",), lambda task, name: FakePipeline())
    running = most = 0
    lock = threading.Lock()

    def work(_: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1

    await asyncio.gather(*(registry.run("a", "task", work, alone=True) for _ in range(4)))
    assert most == 1
    await asyncio.gather(*(registry.run("a", "task", work) for _ in range(4)))
    assert most > 1
    await registry.close()


async def test_a_request_that_leaves_ends_before_the_next_begins() -> None:
    """Also where it waits for the network, for a minute here."""
    registry = NetworkRegistry(("a",), lambda task, name: FakePipeline())
    loop, is_running, ended = LoopThread("network"), threading.Event(), []

    def work(_: Any) -> None:
        is_running.set()
        try:
            loop.run(asyncio.sleep(60))
        finally:
            threading.Event().wait(0.1)
            ended.append("first")

    leaving = asyncio.create_task(registry.run("a", "task", work, alone=True))
    assert await asyncio.to_thread(is_running.wait, 10)
    coming = asyncio.create_task(
        registry.run("a", "task", lambda _: ended.append("next"), alone=True)
    )
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.wait_for(coming, 10)
    assert ended == ["first", "next"]
    loop.close()
    await registry.close()


def test_two_networks_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same name"):
        NetworkRegistry(("org/a", "other/a"))
