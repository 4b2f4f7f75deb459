"""Bytes over a unix socket, on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from nesa_node.swarm.p2p.pipe import MAX_UNREAD_BYTES, SCRATCH_BYTES
from tests.swarm.pipes import pipe_pair


def _on_both_loops(body: Callable[[], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs `body` on one loop, then on the other."""

    @pytest.mark.parametrize(
        "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    def run_on(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(body())

    return run_on


@_on_both_loops
async def test_bytes_arrive_as_sent_in_whatever_pieces_they_are_read() -> None:
    rng = random.Random(1)
    data = rng.randbytes(3 << 20)
    async with pipe_pair() as (here, there):

        async def send() -> None:
            at = 0
            while at < len(data):
                count = rng.choice([1, 7, 4096, 300_000])
                there.write(data[at : at + count])
                await there.drain()
                at += count

        sending = asyncio.create_task(send())
        got = bytearray()
        while len(got) < len(data):
            got += await here.readexactly(
                min(rng.choice([1, 8, 4000, 1 << 20]), 3 * 2**20 - len(got))
            )
        await sending
        assert got == data


@_on_both_loops
async def test_a_pipe_that_nobody_reads_holds_little_and_stops_its_sender() -> None:
    async with pipe_pair() as (here, there):
        there.write(bytes(1 << 20))
        assert not there.is_flushed
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await there.drain()
        assert len(here._unread) < MAX_UNREAD_BYTES + SCRATCH_BYTES
        await here.readexactly(1 << 20)
        async with asyncio.timeout(5):
            await there.drain()
        assert there.is_flushed


@_on_both_loops
async def test_what_came_before_the_end_can_still_be_read() -> None:
    async with pipe_pair() as (here, there):
        there.write(b"last words")
        there.close()
        await there.wait_closed()
        assert await here.readexactly(4) == b"last"
        await here.wait_readable()
        assert here.read_nowait(7) is None
        assert bytes(here.read_nowait(6) or b"") == b" words"
        with pytest.raises(asyncio.IncompleteReadError):
            await here.wait_readable()
        with pytest.raises(asyncio.IncompleteReadError):
            await here.readexactly(1)


@_on_both_loops
async def test_the_end_wakes_who_waits_for_more() -> None:
    async with pipe_pair() as (here, there):
        waiting = asyncio.create_task(here.readexactly(100_000))
        there.write(bytes(1000))
        await asyncio.sleep(0.05)
        there.abort()
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await asyncio.wait_for(waiting, 5)


@_on_both_loops
async def test_an_ended_side_can_still_be_answered() -> None:
    async with pipe_pair() as (here, there):
        there.write_eof()
        with pytest.raises(asyncio.IncompleteReadError):
            await here.wait_readable()
        here.write(b"understood")
        await here.drain()
        assert await there.readexactly(10) == b"understood"


@_on_both_loops
async def test_a_closed_pipe_says_so_when_drained() -> None:
    async with pipe_pair() as (here, _):
        here.close()
        here.close()
        here.write(b"into the void")
        with pytest.raises(ConnectionResetError):
            await here.drain()


@_on_both_loops
async def test_a_writer_learns_that_the_other_side_has_gone() -> None:
    async with pipe_pair() as (here, there):
        here.abort()
        await here.wait_closed()
        there.write(b"x")
        for _ in iter(lambda: there.is_flushed, False):
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionResetError):
            await there.drain()


@_on_both_loops
async def test_memory_lent_to_a_cancelled_read_is_left_alone() -> None:
    async with pipe_pair() as (here, there):
        memory = bytearray(100)
        reading = asyncio.create_task(here.read_into(memoryview(memory)))
        there.write(b"x" * 10)
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.wait({reading})
        there.write(b"y" * 20)
        assert await here.readexactly(20) == b"y" * 20
        assert memory == b"x" * 10 + bytes(90)
