"""Which steps of a session alone run where they arrive, and which leave the event loop its turn."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.cache.pages import pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, TokenSlice
from nesa_node.server.scheduler.batch import QueuedStep, open_executor
from nesa_node.server.scheduler.scheduler import INLINE_BUDGET_S, Scheduler, open_scheduler
from nesa_node.server.scheduler.session_queue import SessionQueue
from nesa_node.swarm.protocol.messages import RowSlice, Step

TOKENS = 64


class Watched:
    """Notes in which thread each pass runs, and makes those slow for which it was asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here: list[bool] = []
        self.seconds = 0.0
        run = ModelBlocks.forward_buffers

        def watched(
            blocks: ModelBlocks, pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]
        ) -> None:
            self.here.append(threading.current_thread() is threading.main_thread())
            time.sleep(self.seconds)
            run(blocks, pieces, runs)

        monkeypatch.setattr(ModelBlocks, "forward_buffers", watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@asynccontextmanager
async def running() -> AsyncIterator[Scheduler]:
    async with open_executor() as executor, open_scheduler(executor) as scheduler:
        yield scheduler


@asynccontextmanager
async def session(scheduler: Scheduler, blocks: ModelBlocks) -> AsyncIterator[SessionQueue]:
    table = blocks.new_pool(TOKENS).reserve(pages_for(TOKENS)).new_table()
    client = PeerId("client")
    opening = scheduler.open_queue([table], blocks, client=client, priority=0, dtype=torch.float32)
    async with opening as work:
        yield work


def submit(scheduler: Scheduler, work: SessionQueue, tokens: int = 1) -> None:
    hidden = HiddenStates.from_tensor(torch.randn(tokens, work.blocks.hidden_size))
    rows = (RowSlice(0, 0, tokens),)
    step = Step(session=b"s" * 16, epoch=0, step=0, rows=rows, tensor=hidden.meta)
    scheduler.submit(work, step, hidden)


async def output(work: SessionQueue) -> None:
    async with asyncio.timeout(10):
        await work.wait_for_output()
    assert work.take_output() is not None
    await asyncio.sleep(0.001)  # what was learnt from it is learnt after it


async def decode(scheduler: Scheduler, work: SessionQueue, steps: int) -> None:
    for _ in range(steps):
        submit(scheduler, work)
        await output(work)


async def test_of_steps_that_come_at_once_one_runs_before_the_loop_has_its_turn(
    blocks: ModelBlocks, watched: Watched
) -> None:
    async with running() as scheduler, session(scheduler, blocks) as work:
        await decode(scheduler, work, 5)
        assert watched.here[-1]
        for _ in range(8):
            submit(scheduler, work)
        assert watched.here[5:] == [True]
        for _ in range(8):
            await output(work)
        assert not any(watched.here[6:])
        await decode(scheduler, work, 2)
        assert watched.here[-1]


async def test_what_other_blocks_took_says_nothing_of_these(
    blocks: ModelBlocks, watched: Watched
) -> None:
    start = blocks.span.start
    async with running() as scheduler:
        async with session(scheduler, blocks.select(Span(start, start + 1))) as work:
            await decode(scheduler, work, 5)
            assert watched.here[-1]
        async with session(scheduler, blocks) as work:
            await decode(scheduler, work, 3)
    assert watched.here[5:] == [False, True, True]


async def test_after_a_step_that_was_not_short_none_runs_here_for_a_while(
    blocks: ModelBlocks, watched: Watched
) -> None:
    async with running() as scheduler, session(scheduler, blocks) as work:
        await decode(scheduler, work, 20)
        assert watched.here[-1]
        watched.seconds = 2 * INLINE_BUDGET_S
        await decode(scheduler, work, 1)
        assert watched.here[-1]
        watched.seconds = 0.0
        await decode(scheduler, work, 20)
    assert not any(watched.here[21:])


async def test_a_prompt_never_runs_here(blocks: ModelBlocks, watched: Watched) -> None:
    async with running() as scheduler, session(scheduler, blocks) as work:
        await decode(scheduler, work, 10)
        submit(scheduler, work, 30)
        await output(work)
        assert not watched.here[-1]


async def test_a_step_that_is_done_is_not_kept_until_the_next(blocks: ModelBlocks) -> None:
    """Its tensors, that is: of a session that ended, too."""
    gc.collect()
    gc.disable()
    try:
        async with running() as scheduler, session(scheduler, blocks) as staying:
            async with session(scheduler, blocks) as ending:
                for work in (staying, ending):
                    submit(scheduler, work)
                for work in (staying, ending):
                    await output(work)
                await asyncio.sleep(0.05)
                assert not [each for each in gc.get_objects() if type(each) is QueuedStep]
            del ending, work
            assert sum(type(each) is SessionQueue for each in gc.get_objects()) == 1
    finally:
        gc.enable()
