"""Connections that ask for nothing keep no request out, and no key holds all there are."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web import connections as connection_module
from nesa_node.web.connections import ConnectionTable, HttpConnection
from tests.web.tiny_gateway import bearer, browser, gate, new_key

Streams = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
SILENT = b""
A_PAGE = b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_A_HEADER = b"GET /health HTTP/1.1\r\nHost: local"
HALF_A_BODY = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"


@asynccontextmanager
async def held(address: HttpAddress, count: int, said: bytes) -> AsyncIterator[Streams]:
    """`count` connections that say so much and no more."""
    streams: Streams = []
    for _ in range(count):
        streams.append(await asyncio.open_connection(address.host, address.port))
        streams[-1][1].write(said)
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


@pytest.mark.parametrize("said", [SILENT, HALF_A_HEADER, HALF_A_BODY])
async def test_connections_without_a_key_keep_nobody_out(tmp_path: Path, said: bytes) -> None:
    key = new_key(tmp_path / "keys.json")
    async with (
        gate(tmp_path / "keys.json") as (gateway, address),
        browser(address, headers=bearer(key)) as client,
        client.stream("GET", "/v1/stream") as stream,
        held(address, 100, said) as streams,
    ):
        lines = stream.aiter_lines()
        assert await anext(lines) == "begin"
        for _ in range(3):
            async with browser(address, headers=bearer(key)) as other:
                assert (await other.get("/v1/models")).status_code == 200
        await asyncio.sleep(0.1)
        ended = [reader.at_eof() or reader.exception() is not None for reader, _ in streams]
        assert sum(ended) >= 100 - 32
        gateway.go_on.set()
        assert await anext(lines) == "end", "an answer was ended to make room"


async def test_answers_that_are_not_read_keep_no_key_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, stalled = new_key(tmp_path / "keys.json"), asyncio.Event()
    pause = HttpConnection.pause_writing

    def noted(connection: HttpConnection) -> None:
        stalled.set()
        pause(connection)

    monkeypatch.setattr(HttpConnection, "pause_writing", noted)
    loop = asyncio.get_running_loop()
    async with gate(tmp_path / "keys.json", max_connections=1) as (_, address):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (address.host, address.port))
            sending = asyncio.create_task(loop.sock_sendall(client, A_PAGE * 10_000))
            async with asyncio.timeout(20):
                await stalled.wait()
            async with browser(address, headers=bearer(key)) as other:
                # It is refused for as long as the kernel takes more of the answers.
                async with asyncio.timeout(5):
                    while (await other.get("/v1/models")).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            sending.cancel()


async def test_one_byte_chunks_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an event: those of 256 kB, asyncio's usual read, take a quarter of a second."""
    key = new_key(tmp_path / "keys.json").encode()
    sizes = []
    receive = HttpConnection.data_received

    def noted(connection: HttpConnection, data: bytes) -> None:
        sizes.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(HttpConnection, "data_received", noted)
    head = b"\r\n".join([b"POST /v1/echo HTTP/1.1", b"Host: localhost", b"Connection: close"])
    head += b"\r\nAuthorization: Bearer " + key + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"1\r\nA\r\n" * 20_000 + b"0\r\n\r\n"
    async with (
        gate(tmp_path / "keys.json") as (_, address),
        held(address, 1, head + body) as [(reader, _)],
    ):
        async with asyncio.timeout(10):
            answer = await reader.read()
    assert answer.endswith(b'{"bytes":20000}')
    assert sum(sizes) == len(head) + len(body)
    assert max(sizes) <= 16_384


@pytest.mark.parametrize("before", [b"", A_PAGE])
async def test_long_headers_are_refused_though_they_come_at_once(
    tmp_path: Path, before: bytes
) -> None:
    new_key(tmp_path / "keys.json")
    head = before + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nCookie: a="
    async with (
        gate(tmp_path / "keys.json") as (_, address),
        held(address, 1, head + b"x" * 60_000 + b"\r\n\r\n") as [(reader, _)],
    ):
        answer = b""
        # What is left unread may turn the end into a reset.
        with suppress(ConnectionResetError):
            async with asyncio.timeout(10):
                while part := await reader.read(65_536):
                    answer += part
    assert answer.count(b"HTTP/1.1 400 ") <= 1
    assert b'"status":"ok"' not in answer


class Transport(asyncio.Transport):
    closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes | bytearray | memoryview) -> None: ...


async def test_a_client_waits_that_does_not_read_unless_it_has_shown_a_key() -> None:
    ended = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await ended.wait()

    table, transport, state = ConnectionTable(5), Transport(), ServerState()
    connection = HttpConnection(
        uvicorn.Config(app, log_config=None, lifespan="off"), state, {}, table=table
    )
    connection.connection_made(transport)
    try:
        connection.data_received(A_PAGE)
        await asyncio.sleep(0)
        waiting = [connection.is_waiting]
        for change in (connection.pause_writing, connection.resume_writing):
            change()
            waiting.append(connection.is_waiting)
        assert waiting == [False, True, False]
        connection.know("alice")
        connection.pause_writing()
        waiting = [connection.is_waiting]
        # What was answered before is left, and may never be read.
        transport.closing = True
        waiting.append(connection.is_waiting)
        assert waiting == [False, True]
    finally:
        connection.connection_lost(ConnectionResetError())
        ended.set()
        await asyncio.gather(*state.tasks)


MALFORMED_CHUNK = b'5\r\n{"mo\r\n0\r\n\r\n'


@pytest.mark.parametrize("line", [b"HEAD /health", b"POST /v1/echo", b"POST /v1/stream"])
@pytest.mark.parametrize("pause_s", [0.0, 0.2])
async def test_a_malformed_body_is_refused_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes, pause_s: float
) -> None:
    """With a pause the answer to the request may have begun."""
    key = new_key(tmp_path / "keys.json").encode()
    headers = [b"Host: localhost", b"Authorization: Bearer " + key, b"Transfer-Encoding: chunked"]
    head = b"\r\n".join([line + b" HTTP/1.1", *headers, b"", b""])
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with gate(tmp_path / "keys.json") as (_, address), held(address, 1, head) as [stream]:
        reader, writer = stream
        await asyncio.sleep(pause_s)
        writer.write(MALFORMED_CHUNK)
        async with asyncio.timeout(10):
            answer = await reader.read()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 200"))
    assert answer.count(b"HTTP/1.1") == 1
    assert not failures
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_open_server_drops_who_waits_too(tmp_path: Path) -> None:
    async with (
        gate(tmp_path / "keys.json") as (_, address),
        held(address, 100, SILENT),
        browser(address) as client,
    ):
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_server_that_answers_on_all_connections_says_so(tmp_path: Path) -> None:
    asking = b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with gate(tmp_path / "keys.json") as (gateway, address), held(address, 32, asking):
        async with asyncio.timeout(5):
            while gateway.streams < 32:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with browser(address) as client:
            refused = await client.get("/v1/models")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert "retry-after" in refused.headers
            gateway.go_on.set()
            await asyncio.sleep(0.2)
            assert (await client.get("/v1/models")).status_code == 200


async def test_one_key_leaves_connections_for_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    many, other = new_key(path, "many"), new_key(path, "other")
    asking = f"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {many}\r\n\r\n"
    told = []
    async with gate(path) as (gateway, address), AsyncExitStack() as stack:
        for _ in range(40):
            ((reader, _),) = await stack.enter_async_context(held(address, 1, asking.encode()))
            told.append((await reader.readline())[9:12])
        assert told == [b"200"] * 24 + [b"429"] * 16
        async with browser(address, headers=bearer(other)) as client:
            assert (await client.get("/v1/models")).status_code == 200
        gateway.go_on.set()


async def test_before_a_key_is_shown_headers_have_less_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "KEYLESS_HEADERS_TIMEOUT_S", 0.3)
    async with gate(tmp_path / "keys.json") as (_, address), held(address, 1, SILENT) as streams:
        async with asyncio.timeout(5):
            assert await streams[0][0].read() == b""


class Waiting:
    def __init__(self, is_waiting: bool = True) -> None:
        self.is_waiting = is_waiting
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def filled(table: ConnectionTable, *addresses: str) -> Sequence[Waiting]:
    peers = [Waiting() for _ in addresses]
    for peer, address in zip(peers, addresses, strict=True):
        table.add(peer, address)
    return peers


def dropped(*peers: Waiting) -> list[bool]:
    return [peer.dropped for peer in peers]


def test_the_address_with_most_connections_makes_room() -> None:
    table = ConnectionTable(5)
    peers = filled(table, "a", "b", "b", "c", "b")
    filled(table, "d")
    assert dropped(*peers) == [False, True, False, False, False]
    assert len(table) == 5


def test_idle_connections_of_keys_make_room_last() -> None:
    table = ConnectionTable(3)
    holder, busy, stranger = filled(table, "a", "a", "b")
    assert table.assign_key(holder, "alice")
    busy.is_waiting = False
    filled(table, "c")
    assert dropped(holder, stranger) == [False, True]
    (second,) = filled(table, "c")
    assert dropped(holder) == [False]
    assert table.has_room(second)
    table.remove(second)
    table.remove(second)
    assert len(table) == 2
    for peer in filled(table, "d"):
        peer.is_waiting = False
    (last,) = filled(table, "e")
    assert dropped(holder) == [True]
    assert table.has_room(last)
    last.is_waiting = False
    (surplus,) = filled(table, "f")
    assert not table.has_room(surplus)
    table.remove(busy)
    assert table.has_room(surplus)
