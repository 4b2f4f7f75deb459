"""The peer id behind host and port: a real p2pd answers, and things that are none."""

from __future__ import annotations

import asyncio
import datetime
import re
import socket
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from nesa_node.core.errors import BootstrapError, ConfigError, PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.dial_addresses import _peer_of_certificate, fetch_peer_id, resolve_peer_ids
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.transport import open_transport

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def port_of(address: str) -> int:
    return int(address.split("/")[4])


async def test_a_peer_proves_its_id(tmp_path: Path) -> None:
    identity = Identity.ephemeral(tmp_path)
    async with open_transport(identity, host_maddrs=LOOPBACK) as transport:
        (address,) = transport.addresses
        port = port_of(address)
        assert await fetch_peer_id("127.0.0.1", port) == identity.peer_id
        assert await resolve_peer_ids([f"127.0.0.1:{port}"]) == (address,)
        named = f"/dns/localhost/tcp/{port}/p2p/{identity.peer_id}"
        assert await resolve_peer_ids([f"localhost:{port}"]) == (named,)
        assert await resolve_peer_ids([address]) == (address,)
        assert await resolve_peer_ids(["127.0.0.1:1", f"127.0.0.1:{port}"]) == (address,)


async def test_a_swarm_is_joined_by_host_and_port(tmp_path: Path) -> None:
    first = Identity.ephemeral(tmp_path)
    async with open_swarm(first, host_maddrs=LOOPBACK) as swarm:
        port = port_of(swarm.transport.addresses[0])
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=[f"127.0.0.1:{port}"], listen=False
        ) as client:
            assert first.peer_id in await client.transport.control.connected_peers()


async def test_a_port_where_nothing_listens_is_a_bootstrap_error() -> None:
    with pytest.raises(BootstrapError, match=r"127\.0\.0\.1:1: .*check that a nesa-node listens"):
        await resolve_peer_ids(["127.0.0.1:1"])


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\xff" * 300])
async def test_another_service_is_told_from_a_node(said: bytes) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerUnreachableError, match="no libp2p port of a nesa-node"):
            await fetch_peer_id("127.0.0.1", port)


async def test_a_silent_port_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nesa_node.swarm.p2p.dial_addresses.LOOKUP_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(PeerUnreachableError, match=r"no answer within 0\.2 s"),
    ):
        await fetch_peer_id("127.0.0.1", server.getsockname()[1])


async def test_a_silent_port_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    waits = WaitTracker()

    async def ask(_host: str, _port: int) -> PeerId:
        wait = waits.slow_wait(0)
        assert wait is not None
        told.append(wait.what)
        raise PeerUnreachableError("silent")

    monkeypatch.setattr("nesa_node.swarm.p2p.dial_addresses.fetch_peer_id", ask)
    with waits.activate(), pytest.raises(BootstrapError):
        await resolve_peer_ids(["192.0.2.7:1"])
    assert told == ["initial peers to send their peer ids"]


async def test_an_address_without_id_that_is_not_tcp_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="must end in /p2p/"):
        await resolve_peer_ids(["/ip4/127.0.0.1/udp/4001/quic-v1"])


@pytest.mark.parametrize("change", [(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x12"), (b"", b"")])
def test_a_certificate_that_cannot_be_read_is_no_peer(change: tuple[bytes, bytes]) -> None:
    """cryptography has exceptions of its own for versions and curves that it does not know."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peer")])
    day = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, day, day).sign(key, None)
    with pytest.raises(ValueError, match="not a libp2p certificate"):
        _peer_of_certificate(made.public_bytes(Encoding.DER).replace(*change, 1))


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "/ip4/127.0.0.1/tcp/65536", "a..b:31330"])
async def test_an_address_that_cannot_exist_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(address))):
        await resolve_peer_ids([address])


async def test_a_name_that_cannot_be_asked_for_is_told_from_another_service() -> None:
    with pytest.raises(PeerUnreachableError, match="is no name of a machine"):
        await fetch_peer_id("a..b", 31330)


async def test_an_ipv6_address_is_named_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    with pytest.raises(PeerUnreachableError, match=r"^\[::1\]:38330: Connection refused"):
        await fetch_peer_id("::1", 38330)
