"""An interrupt ends what a session does, in the loop and on the nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.loop_thread import Interrupt, LoopThread
from nesa_node.client.session.hop import HopLink
from nesa_node.swarm.protocol.messages import Open
from tests.client.local_models import random_ids
from tests.client.test_lifecycle import ScriptedConnection, scripted_model
from tests.engine.tiny_models import BLOCKS
from tests.nodes_seen import NodesSeen
from tests.swarms import in_process_swarm, thirds


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.close()


@contextmanager
def set_soon(interrupt: Interrupt, when: Callable[[], object]) -> Iterator[None]:
    """Set it from another thread, once `when` has returned."""

    def work() -> None:
        when()
        interrupt.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_it_cancels_what_runs_and_refuses_what_comes_later(loop: LoopThread) -> None:
    interrupt, running, ended = Interrupt(), threading.Event(), threading.Event()

    async def forever() -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    began = time.monotonic()
    with set_soon(interrupt, running.wait), pytest.raises(CancelledError):
        loop.run(forever(), interrupt=interrupt)
    assert ended.wait(5)
    with pytest.raises(CancelledError):
        loop.run(forever(), interrupt=interrupt)
    assert time.monotonic() - began < 5

    async def quick() -> int:
        return 1

    assert loop.run(quick()) == 1


def test_a_context_that_was_entered_in_the_same_moment_is_left(loop: LoopThread) -> None:
    interrupt, left = Interrupt(), threading.Event()

    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        # Nobody can take the context any more, though entering it succeeds.
        interrupt.set()
        try:
            yield
        finally:
            left.set()

    with pytest.raises(CancelledError):
        loop.hold(context(), interrupt=interrupt)
    assert left.wait(5)


def test_a_context_is_not_entered_any_further(loop: LoopThread) -> None:
    interrupt, entering, ended = Interrupt(), threading.Event(), threading.Event()

    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        entering.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        yield

    with set_soon(interrupt, entering.wait), pytest.raises(CancelledError):
        loop.hold(context(), interrupt=interrupt)
    assert ended.wait(5)


def test_a_step_is_cancelled_and_its_session_closed(tiny: Callable[[str], Path]) -> None:
    running, interrupt = threading.Event(), Interrupt()

    async def forever() -> None:
        running.set()
        await asyncio.sleep(60)

    connection = ScriptedConnection(forever)
    with scripted_model(tiny("llama"), connection) as model:
        session = model.inference_session(max_length=8, interrupt=interrupt)
        with set_soon(interrupt, running.wait), pytest.raises(CancelledError):
            session.step(random_ids(1, 4))
        assert session.closed
        assert connection.sessions[0].events == ["step", "cancelled", "closed"]


def test_hops_that_are_open_are_closed_when_another_is_still_awaited(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, opening, others = NodesSeen(monkeypatch), threading.Event(), threading.Event()
    open_link, opened = HopLink.open, []

    async def open_two(link: HopLink, message: Open, timeout_s: float) -> None:
        if link.hop.span.start == 0:
            opening.set()
            await asyncio.sleep(60)
        await open_link(link, message, timeout_s)
        opened.append(link)
        if len(opened) == 2:
            others.set()

    monkeypatch.setattr(HopLink, "open", open_two)

    def both() -> None:
        opening.wait(20)
        others.wait(20)

    interrupt = Interrupt()
    with (
        in_process_swarm(tiny("llama"), thirds(BLOCKS), tmp_path) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny("llama"), initial_peers=addresses, dtype=torch.float32
        ) as model,
    ):
        with set_soon(interrupt, both), pytest.raises(CancelledError):
            model.inference_session(8, interrupt=interrupt)
        nodes.wait_until_free(1.0)
