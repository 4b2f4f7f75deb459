"""The network on uvloop, in the main thread and in another one, as daemon and client use it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import uvloop

from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p import tasks as event_loop
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.swarm.p2p.transport import open_transport

ECHO = "/test/echo"


async def _echo(peer: PeerId, pipe: Pipe, _: Pipe) -> None:
    while True:
        pipe.write(await pipe.readexactly(10))


async def _exchange_and_lose_a_daemon(directory: Path) -> type[asyncio.AbstractEventLoop]:
    loopback = ("/ip4/127.0.0.1/tcp/0",)
    async with (
        open_transport(Identity.ephemeral(directory), host_maddrs=loopback) as server,
        open_transport(
            Identity.ephemeral(directory), initial_peers=server.addresses, listen=False
        ) as client,
    ):
        await server.serve(ECHO, _echo)
        pipe, _ = await client.open_stream(server.peer_id, ECHO)
        pipe.write(b"0123456789")
        assert await pipe.readexactly(10) == b"0123456789"
        os.kill(client.daemon_pid, signal.SIGKILL)
        await asyncio.wait_for(client.daemon_exited.wait(), 5)
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await asyncio.wait_for(pipe.wait_readable(), 5)
        pipe.close()
    return type(asyncio.get_running_loop())


def test_a_transport_works_on_uvloop(tmp_path: Path) -> None:
    assert event_loop.run_event_loop(_exchange_and_lose_a_daemon(tmp_path)) is uvloop.Loop


def test_a_transport_works_on_uvloop_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[type[asyncio.AbstractEventLoop]] = []
    thread = threading.Thread(
        target=lambda: results.append(
            event_loop.run_event_loop(_exchange_and_lose_a_daemon(tmp_path))
        )
    )
    thread.start()
    thread.join()
    assert results == [uvloop.Loop]


def test_signal_handlers_of_the_loop_are_called() -> None:
    async def wait_for_signal() -> None:
        came = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, came.set)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(came.wait(), 5)
        loop.remove_signal_handler(signal.SIGTERM)

    event_loop.run_event_loop(wait_for_signal())


def test_an_interrupt_ends_the_loop() -> None:
    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        event_loop.run_event_loop(interrupted())


def test_without_uvloop_the_usual_loop_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loop_type() -> type[asyncio.AbstractEventLoop]:
        return type(asyncio.get_running_loop())

    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert issubclass(event_loop.run_event_loop(loop_type()), asyncio.BaseEventLoop)
    assert event_loop.run_event_loop(loop_type()) is not uvloop.Loop
