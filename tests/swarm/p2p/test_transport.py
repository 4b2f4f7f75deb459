"""Streams over real p2pd processes on the loopback interface."""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from nesa_node.core.errors import (
    AddressInUseError,
    BootstrapError,
    ConfigError,
    IdentityError,
    NoAddressError,
    PeerUnreachableError,
    SwarmError,
)
from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p import p2pd, transport
from nesa_node.swarm.p2p.control import ControlSocket, pack_multiaddr
from nesa_node.swarm.p2p.hivemind_imports import P2PD_PATH
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.swarm.p2p.transport import Transport, open_transport

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/test/echo"


@asynccontextmanager
async def _node(
    tmp_path: Path, *initial_peers: str, listen: bool = True
) -> AsyncIterator[Transport]:
    identity = Identity.ephemeral(tmp_path)
    async with open_transport(
        identity, host_maddrs=LOOPBACK, initial_peers=initial_peers, listen=listen
    ) as opened:
        yield opened


async def _echo(peer: PeerId, pipe: Pipe, _: Pipe) -> None:
    """Name the peer, then give back whatever comes in pieces of a byte or of 64 KiB."""
    pipe.write(peer.encode())
    while True:
        await pipe.wait_readable()
        data = pipe.read_nowait(65536) or pipe.read_nowait(1)
        assert data is not None
        pipe.write(data)
        await pipe.drain()


async def _open_echo(client: Transport, server: PeerId, addresses: Sequence[str] = ()) -> Pipe:
    """A stream whose server has greeted this client by its id."""
    pipe: Pipe
    pipe, _ = await client.open_stream(server, ECHO, addresses)
    greeting = client.peer_id.encode()
    assert await asyncio.wait_for(pipe.readexactly(len(greeting)), 10) == greeting
    return pipe


async def _is_over(pipe: Pipe) -> bool:
    with pytest.raises((asyncio.IncompleteReadError, OSError)):
        await asyncio.wait_for(pipe.wait_readable(), 5)
    return True


async def test_stream_carries_three_mebibytes_and_names_the_dialler(tmp_path: Path) -> None:
    async with _node(tmp_path) as server, _node(tmp_path, *server.addresses) as client:
        await server.serve(ECHO, _echo)
        pipe = await _open_echo(client, server.peer_id)
        data = os.urandom(3 * 2**20)
        pipe.write(data)
        assert await pipe.readexactly(len(data)) == data
        pipe.close()


async def test_a_second_stream_needs_no_connection_but_gets_one_where_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _node(tmp_path) as server, _node(tmp_path) as client:
        await server.serve(ECHO, _echo)
        asked: list[PeerId] = []
        connect = client.control.connect

        async def noted(peer: PeerId, packed: Sequence[bytes], timeout_s: float) -> None:
            asked.append(peer)
            await connect(peer, packed, timeout_s)

        monkeypatch.setattr(client.control, "connect", noted)
        for _ in range(3):
            (await _open_echo(client, server.peer_id, server.addresses)).close()
        assert asked == [server.peer_id]
        await client.control.disconnect(server.peer_id)
        (await _open_echo(client, server.peer_id, server.addresses)).close()


async def test_a_peer_that_came_back_elsewhere_is_reached_at_its_new_address(
    tmp_path: Path,
) -> None:
    identity = Identity.ephemeral(tmp_path)
    async with _node(tmp_path) as client:
        seen: list[tuple[str, ...]] = []
        for _ in range(3):
            async with open_transport(identity, host_maddrs=LOOPBACK) as server:
                await server.serve(ECHO, _echo)
                (await _open_echo(client, server.peer_id, server.addresses)).close()
                seen.append(server.addresses)
        assert len(set(seen)) > 1
        with pytest.raises(PeerUnreachableError):
            await client.open_stream(server.peer_id, ECHO, server.addresses, timeout_s=5)


async def test_daemon_has_the_peer_id_of_the_key(tmp_path: Path) -> None:
    async with _node(tmp_path) as node:
        peer_id, _ = await node.control.identify()
        assert peer_id == node.peer_id
        assert all(address.endswith(f"/p2p/{peer_id}") for address in node.addresses)
        assert node.addresses[0].startswith("/ip4/127.0.0.1/tcp/")


async def test_peer_is_found_by_its_id_through_a_third(tmp_path: Path) -> None:
    async with (
        _node(tmp_path) as first,
        _node(tmp_path, *first.addresses) as second,
        _node(tmp_path, *first.addresses, listen=False) as third,
    ):
        await second.serve(ECHO, _echo)
        (await _open_echo(third, second.peer_id)).close()


async def test_peer_is_dialled_at_given_addresses_and_foreign_ones_are_ignored(
    tmp_path: Path,
) -> None:
    async with _node(tmp_path) as server, _node(tmp_path) as client:
        await server.serve(ECHO, _echo)
        addresses = ("nonsense", f"/ip4/127.0.0.1/tcp/1/p2p/{client.peer_id}", *server.addresses)
        (await _open_echo(client, server.peer_id, addresses)).close()


async def test_failing_handler_ends_its_own_stream_only(tmp_path: Path) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a handler's own mistake")

    async with _node(tmp_path) as server, _node(tmp_path, *server.addresses) as client:
        await server.serve(ECHO, _echo)
        await server.serve("/test/fail", fail)
        kept = await _open_echo(client, server.peer_id)
        failed, _ = await client.open_stream(server.peer_id, "/test/fail")
        assert await _is_over(failed)
        failed.close()
        kept.write(b"still here")
        assert await kept.readexactly(10) == b"still here"
        kept.close()


async def test_whoever_was_told_the_last_words_closes_first(tmp_path: Path) -> None:
    """Else they may be lost."""
    ends: list[Pipe] = []

    async def say_goodbye(_: PeerId, __: Pipe, writer: Pipe) -> None:
        writer.write(b"goodbye")
        ends.append(writer)

    async with _node(tmp_path) as server, _node(tmp_path, *server.addresses) as client:
        await server.serve("/test/goodbye", say_goodbye)
        polite, _ = await client.open_stream(server.peer_id, "/test/goodbye")
        assert await asyncio.wait_for(polite.readexactly(7), 5) == b"goodbye"
        assert ends[0].is_flushed  # open
        polite.close()
        await asyncio.wait_for(ends[0].wait_closed(), 5)

        silent, _ = await client.open_stream(server.peer_id, "/test/goodbye")
        assert await asyncio.wait_for(silent.readexactly(7), 5) == b"goodbye"
        assert await _is_over(silent)
        silent.close()


async def test_unknown_protocol_and_unknown_peer_are_errors(tmp_path: Path) -> None:
    stranger = Identity.ephemeral(tmp_path).peer_id
    async with _node(tmp_path) as server, _node(tmp_path, *server.addresses) as client:
        with pytest.raises(PeerUnreachableError, match="protocols not supported"):
            await client.open_stream(server.peer_id, "/test/nothing")
        with pytest.raises(PeerUnreachableError, match="no stream to"):
            await client.open_stream(stranger, ECHO, timeout_s=3)
        here = [f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"]
        with pytest.raises(PeerUnreachableError, match="connection refused"):
            await client.open_stream(stranger, ECHO, here)
        client.announce_addresses = ("/ip4/8.8.8.8/tcp/1",)
        with pytest.raises(NoAddressError, match="no stream to"):
            await client.open_stream(stranger, ECHO, here)


async def test_silent_peer_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    """A listener that accepts and says nothing is no libp2p peer."""
    stranger = Identity.ephemeral(tmp_path).peer_id
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with _node(tmp_path) as client:
            began = time.monotonic()
            with pytest.raises(PeerUnreachableError):
                await client.open_stream(
                    stranger, ECHO, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}"], timeout_s=1
                )
            assert time.monotonic() - began < 2


async def test_one_peer_cannot_hold_streams_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_STREAMS_PER_PEER", 3)
    async with _node(tmp_path) as server, _node(tmp_path, *server.addresses) as client:
        await server.serve(ECHO, _echo)
        pipes = [await _open_echo(client, server.peer_id) for _ in range(3)]
        refused, _ = await client.open_stream(server.peer_id, ECHO)
        assert await _is_over(refused)
        for pipe in [*pipes, refused]:
            pipe.close()
        await asyncio.sleep(0.1)
        (await _open_echo(client, server.peer_id)).close()


async def test_handlers_are_cancelled_at_close(tmp_path: Path) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait_forever(*_: object) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with _node(tmp_path) as client:
        async with _node(tmp_path, *client.addresses) as server:
            await server.serve(ECHO, wait_forever)
            pipe, _ = await client.open_stream(server.peer_id, ECHO)
            await asyncio.wait_for(started.wait(), 5)
        assert cancelled.is_set()
        assert await _is_over(pipe)
        pipe.close()


async def test_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"/ip4/127.0.0.1/tcp/{busy.getsockname()[1]}"
        with pytest.raises(AddressInUseError, match=address):
            async with open_transport(
                Identity.ephemeral(tmp_path), host_maddrs=(*LOOPBACK, address)
            ):
                pass


async def test_port_of_another_p2pd_is_busy_too(tmp_path: Path) -> None:
    """p2pd sets SO_REUSEPORT: two of them would share the port and each lose half its streams."""
    async with _node(tmp_path) as node:
        bare = node.addresses[0].partition("/p2p/")[0]
        with pytest.raises(AddressInUseError, match="in use"):
            async with open_transport(Identity.ephemeral(tmp_path), host_maddrs=(bare,)):
                pass


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("/ip4/203.0.113.1/tcp/0", "/ip4/0.0.0.0/tcp/0"),
        ("/ip4/203.0.113.1/udp/31330/quic-v1", "/ip4/0.0.0.0/udp/31330/quic-v1"),
        ("/ip6/2001:db8::1/tcp/31330", "/ip6/::/tcp/31330"),
    ],
)
async def test_an_address_that_this_machine_lacks_is_named_with_the_way_to_announce_it(
    tmp_path: Path, address: str, instead: str
) -> None:
    told = f"cannot listen on {address}: this machine has no such address; listen on {instead}, "
    with pytest.raises(SwarmError, match=f"{told}.*--announce-maddrs"):
        async with open_transport(Identity.ephemeral(tmp_path), host_maddrs=(*LOOPBACK, address)):
            pass


async def test_a_port_that_needs_a_privilege_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Guarded(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("nesa_node.swarm.p2p.p2pd.socket.socket", Guarded)
    with pytest.raises(SwarmError, match=r"tcp/80: port 80 needs a privilege; .* above 1023"):
        async with open_transport(
            Identity.ephemeral(tmp_path), host_maddrs=("/ip4/127.0.0.1/tcp/80",)
        ):
            pass


async def test_initial_peers_that_do_not_answer_are_named(tmp_path: Path) -> None:
    missing = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral(tmp_path).peer_id}"
    with pytest.raises(BootstrapError, match=missing):
        async with _node(tmp_path, missing):
            pass
    async with _node(tmp_path) as alive, _node(tmp_path, missing, *alive.addresses) as node:
        assert alive.peer_id in await node.control.connected_peers()


async def test_own_address_among_the_initial_peers_is_skipped(tmp_path: Path) -> None:
    identity = Identity.ephemeral(tmp_path)
    own = f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"
    async with open_transport(identity, host_maddrs=LOOPBACK, initial_peers=[own]):
        pass


@pytest.mark.parametrize("address", ["nonsense", "/ip4/127.0.0.1/tcp/1", "/p2p/12D3KooW"])
async def test_malformed_initial_peer_is_a_config_error(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=address):
        async with _node(tmp_path, address):
            pass


async def test_second_node_with_the_same_key_is_refused(tmp_path: Path) -> None:
    identity = Identity.ephemeral(tmp_path)
    async with open_transport(identity, host_maddrs=LOOPBACK):
        with pytest.raises(IdentityError, match="in use by another"):
            async with open_transport(identity, host_maddrs=LOOPBACK):
                pass


async def test_killed_daemon_is_noticed_and_calls_fail_at_once(tmp_path: Path) -> None:
    async with _node(tmp_path) as server, _node(tmp_path, *server.addresses) as client:
        await server.serve(ECHO, _echo)
        pipe = await _open_echo(client, server.peer_id)
        os.kill(client.daemon_pid, signal.SIGKILL)
        await asyncio.wait_for(client.daemon_exited.wait(), 2)
        assert await _is_over(pipe)
        pipe.close()
        with pytest.raises(PeerUnreachableError, match="daemon of this node is gone"):
            await client.open_stream(server.peer_id, ECHO)
        with pytest.raises(PeerUnreachableError):
            await client.unary.call(server.peer_id, "/test/unary", b"")
        assert not server.daemon_exited.is_set()


async def test_only_a_callers_own_cancellation_is_one_once_the_daemon_has_ended(
    tmp_path: Path,
) -> None:
    async def wait_for(task: asyncio.Task[None], transport: Transport) -> None:
        with transport.check_alive_during():
            await task

    async with _node(tmp_path) as node:
        for dies in (False, True):
            task = asyncio.create_task(asyncio.sleep(60))
            cancelled, told = (asyncio.create_task(wait_for(task, node)) for _ in range(2))
            await asyncio.sleep(0)
            if dies:
                os.kill(node.daemon_pid, signal.SIGKILL)
                await asyncio.wait_for(node.daemon_exited.wait(), 2)
            cancelled.cancel()
            task.cancel()
            await asyncio.wait({cancelled, told})
            assert cancelled.cancelled()
            assert told.cancelled() is not dies
        assert isinstance(told.exception(), SwarmError)
        with pytest.raises(SwarmError, match="p2pd"), node.check_alive_during():
            pytest.fail("nothing is begun any more")


async def test_error_in_the_body_comes_out_unwrapped(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with _node(tmp_path):
            _ = 1 / 0


async def test_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    for delay_s in (0.0, 0.05, 0.15):

        async def start() -> None:
            async with _node(tmp_path):
                await asyncio.Event().wait()

        task = asyncio.create_task(start())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_nothing_is_printed_and_log_levels_keep_their_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with _node(tmp_path) as first, _node(tmp_path, *first.addresses):
        pass
    assert capfd.readouterr().err == ""
    assert logging.getLevelName(logging.WARNING) == "WARNING"


def test_directory_of_a_killed_process_is_removed_and_a_live_one_stays(tmp_path: Path) -> None:
    with p2pd._runtime_directory() as live:
        stale = live.with_name(live.name + "x")
        stale.mkdir(mode=0o700)
        (stale / "p2pd.sock").touch()
        with p2pd._runtime_directory() as other:
            assert live.exists()
            assert other.stat().st_mode & 0o777 == 0o700
        assert not stale.exists()
    assert not live.exists()


_RUN_A_NODE = """
import asyncio, sys
from pathlib import Path
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.pipe import Pipe
from nesa_node.swarm.p2p.transport import open_transport
async def main():
    async with open_transport(
        Identity.load_or_create(Path(sys.argv[1])), host_maddrs=("/ip4/127.0.0.1/tcp/0",)
    ) as node:
        print(node.daemon_pid, flush=True, file=sys.stderr)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_daemon_ends_with_a_killed_node(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUN_A_NODE, str(path), stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    daemon = psutil.Process(int(await asyncio.wait_for(process.stderr.readline(), 30)))
    process.kill()
    await process.wait()
    await asyncio.to_thread(psutil.wait_procs, [daemon], timeout=3)
    assert not daemon.is_running()
    # The kernel has released the key, and this start removes the dead one's directory.
    async with open_transport(Identity.load_or_create(path), host_maddrs=LOOPBACK):
        pass


async def test_nothing_listens_on_quic_unless_told_to(tmp_path: Path) -> None:
    """quic-go 0.40 is what p2pd embeds, and it cannot be built without."""
    defaults = inspect.signature(open_transport).parameters["host_maddrs"].default
    assert not any("udp" in address or "quic" in address for address in defaults)
    async with open_transport(Identity.ephemeral(tmp_path)) as node:
        assert node.addresses
        assert not any("/udp/" in address or "quic" in address for address in node.addresses)
        sockets = psutil.Process(node.daemon_pid).net_connections()
        assert not [each for each in sockets if each.type == socket.SOCK_DGRAM]


async def test_strangers_quic_addresses_are_not_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[Sequence[bytes]] = []

    async def connect(self: ControlSocket, peer: PeerId, packed: Sequence[bytes], _: float) -> None:
        dialled.append(packed)

    monkeypatch.setattr(ControlSocket, "connect", connect)
    other = Identity.ephemeral(tmp_path).peer_id
    quic, tcp = "/ip4/127.0.0.1/udp/9/quic-v1", "/ip4/127.0.0.1/tcp/9"
    records = [f"{address}/p2p/{other}" for address in (quic, tcp)]
    async with open_transport(Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK) as node:
        await node.connect(other, records)
        node._dials_quic = True
        await node.connect(other, records)
    assert dialled == [[pack_multiaddr(tcp)], [pack_multiaddr(quic), pack_multiaddr(tcp)]]


async def test_other_daemon_than_hiveminds_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "p2pd"
    shutil.copy(P2PD_PATH, changed)
    os.truncate(changed, 1_000_000)
    monkeypatch.setattr(p2pd, "P2PD_PATH", str(changed))
    with pytest.raises(SwarmError, match=r"hivemind 1\.1\.12 ships"):
        async with open_transport(Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK):
            pass
