"""Bodies that are too large, too slow or never end, and connections that say nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web import body_reader as bodies_module
from nesa_node.web import connections as connection_module
from nesa_node.web import problem as refusal_module
from nesa_node.web.body_reader import BodyReader
from nesa_node.web.problem import HttpProblem
from tests.web.tiny_gateway import bearer, browser, gate, new_key

MIB = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def in_parts(count: int, size: int = 65_536) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


class Script:
    """A `receive` that gives what it was given, and then says that the client has gone."""

    def __init__(self, *parts: bytes, ends: bool = True) -> None:
        last = len(parts) - 1 if ends else -1
        self._messages: Iterator[Message] = iter(
            [
                {"type": "http.request", "body": part, "more_body": at != last}
                for at, part in enumerate(parts)
            ]
        )

    async def __call__(self) -> Message:
        return next(self._messages, {"type": "http.disconnect"})


def scope(length: int | None = None) -> dict[str, object]:
    name, value = (
        (b"transfer-encoding", b"chunked")
        if length is None
        else (b"content-length", b"%d" % length)
    )
    return {"type": "http", "headers": [(name, value)]}


async def test_a_body_comes_as_one_and_after_it_what_else_comes() -> None:
    bodies = BodyReader(10)
    async with bodies.read_whole(scope(), Script(b"12345", b"", b"67890")) as whole:
        assert await whole() == {"type": "http.request", "body": b"1234567890", "more_body": False}
        assert bodies.held_bytes == 10
        assert await whole() == {"type": "http.disconnect"}
    assert bodies.held_bytes == 0


async def test_without_a_body_nothing_is_read() -> None:
    receive = Script(b"")
    async with BodyReader(10).read_whole({"type": "http", "headers": []}, receive) as whole:
        assert whole is receive


@pytest.mark.parametrize("length", [11, None])
async def test_one_byte_too_many_is_413(length: int | None) -> None:
    bodies = BodyReader(10)
    with pytest.raises(HttpProblem, match="10 bytes") as refused:
        async with bodies.read_whole(scope(length), Script(b"x" * 10, b"x")):
            pass
    assert refused.value.status == 413
    assert bodies.held_bytes == 0


async def test_who_leaves_in_the_middle_leaves_nothing() -> None:
    bodies = BodyReader(10)
    with pytest.raises(ClientDisconnect):
        async with bodies.read_whole(scope(9), Script(b"12345", ends=False)):
            pass
    assert bodies.held_bytes == 0


async def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "MAX_HELD_BODIES", 1)
    bodies = BodyReader(10)
    async with bodies.read_whole(scope(6), Script(b"123456")):
        with pytest.raises(HttpProblem) as refused:
            async with bodies.read_whole(scope(6), Script(b"123456")):
                pass
        assert (refused.value.status, refused.value.retry_after_s) == (503, 2)
        async with bodies.read_whole(scope(4), Script(b"1234")):
            assert bodies.held_bytes == 10
    assert bodies.held_bytes == 0


async def test_one_caller_holds_half_of_all_bodies_and_a_quarter_beside_others() -> None:
    bodies = BodyReader(10, max_held_bodies=8)

    async def hold(stack: AsyncExitStack, times: int, caller: str | None) -> None:
        for _ in range(times):
            body = bodies.read_whole(scope(10), Script(b"1234567890"), caller=caller)
            await stack.enter_async_context(body)

    async with AsyncExitStack() as stack:
        for caller, times in (("alice", 4), ("bob", 2)):
            await hold(stack, times, caller)
            with pytest.raises(HttpProblem) as refused:
                await hold(stack, 1, caller)
            assert (refused.value.status, refused.value.retry_after_s) == (429, 2)
        await hold(stack, 2, None)
        assert bodies.held_bytes == 80
    async with AsyncExitStack() as stack:
        await hold(stack, 1, "alice")
        assert bodies.held_bytes == 10
    assert bodies.held_bytes == 0


async def test_large_requests_of_one_key_leave_room_for_those_of_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_module, "DISCARD_TIMEOUT_S", 0.2)
    keys = [bearer(new_key(path, name)) for name in ("alice", "bob")]
    async with gate(path, max_request_bytes=MIB) as (gateway, address), AsyncExitStack() as stack:
        alice, bob = [
            await stack.enter_async_context(browser(address, headers=key)) for key in keys
        ]
        statuses = []
        for _ in range(bodies_module.MAX_HELD_BODIES):
            asked = alice.stream("POST", "/v1/stream", content=b" " * MIB)
            statuses.append((await stack.enter_async_context(asked)).status_code)
        assert statuses.count(200) == gateway.streams == bodies_module.MAX_HELD_BODIES // 2
        assert set(statuses) == {200, 429}
        assert (await bob.post("/v1/echo", content=b" " * MIB)).json() == {"bytes": MIB}
        gateway.go_on.set()


async def test_bodies_that_strangers_send_to_public_paths_are_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_module, "DISCARD_TIMEOUT_S", 0.2)
    key = new_key(path)
    async with gate(path, max_request_bytes=MIB) as (_, address), AsyncExitStack() as stack:
        unfinished = head(address, MIB).replace(b"POST /v1/echo", b"GET /health")
        for _ in range(bodies_module.MAX_HELD_BODIES):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            stack.callback(writer.close)
            writer.write(unfinished + b" " * (MIB - 1))
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        client = await stack.enter_async_context(browser(address, headers=bearer(key)))
        assert (await client.post("/v1/echo", content=b" " * MIB)).json() == {"bytes": MIB}
        assert (await client.get("/health", headers={"content-length": "0"})).status_code == 200


async def test_a_body_that_trickles_is_408() -> None:
    bodies = BodyReader(10, read_timeout_s=0.05)

    async def receive() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"", "more_body": True}

    with pytest.raises(HttpProblem) as refused:
        async with bodies.read_whole(scope(9), receive):
            pass
    assert refused.value.status == 408
    assert bodies.held_bytes == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_whoever_sends_too_much_can_read_that_it_was_too_much(
    path: Path, declared: bool
) -> None:
    """Also while it is still sending: an answer followed by a reset would be lost."""
    content = b"x" * (20 * MIB) if declared else in_parts(320)
    async with gate(path, max_request_bytes=MIB) as (_, address), browser(address) as client:
        response = await client.post("/v1/echo", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        fits = await client.post("/v1/echo", content=b"x" * MIB)
        assert fits.json() == {"bytes": MIB}


async def test_without_a_key_no_body_is_read_and_the_refusal_arrives(path: Path) -> None:
    new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        response = await client.post("/v1/echo", content=in_parts(64))
        assert response.status_code == 401
        assert response.headers["connection"] == "close"


async def raw(address: HttpAddress, *parts: bytes) -> tuple[bytes, float]:
    """What comes back until the server closes, and after how long."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    began = loop.time()
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(10):
            said = await reader.read()
        return said, loop.time() - began
    finally:
        writer.close()


def head(address: HttpAddress, length: int, *more: str) -> bytes:
    lines = ["POST /v1/echo HTTP/1.1", f"Host: {address}", f"Content-Length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def test_a_slow_body_ends_in_a_408_and_gives_its_slot_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_module, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(refusal_module, "DISCARD_TIMEOUT_S", 0.2)
    key = new_key(path, concurrent_requests=1)
    async with gate(path) as (_, address), browser(address, headers=bearer(key)) as client:
        said, after_s = await raw(address, head(address, 100, f"Authorization: Bearer {key}"), b"x")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in said
        assert after_s < 5
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_refused_client_that_goes_on_sending_is_cut_off(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_module, "DISCARD_TIMEOUT_S", 0.2)
    new_key(path)
    async with gate(path) as (_, address):
        said, after_s = await raw(address, head(address, 10**6), b"x")
        assert said.startswith(b"HTTP/1.1 401 ")
        assert after_s < 5


async def test_who_asks_before_sending_is_refused_before_sending(path: Path) -> None:
    new_key(path)
    async with gate(path) as (_, address):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head(address, 10, "Expect: 100-continue"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_headers_that_never_end_do_not_hold_a_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEADERS_TIMEOUT_S", 0.3)
    async with gate(path) as (_, address):
        for parts in ((), (b"GET / HT",), (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",)):
            said, after_s = await raw(address, *parts)
            assert said == b""
            assert after_s < 5


async def test_a_byte_now_and_then_wins_no_time_for_headers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEADERS_TIMEOUT_S", 0.4)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with gate(path) as (_, address):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(b"}")

        async def trickle() -> None:
            while True:
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.05)

        sending = asyncio.create_task(trickle())
        try:
            async with asyncio.timeout(5):
                assert await reader.read() == b""
        except ConnectionResetError:
            pass
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()


async def test_a_request_that_takes_longer_than_headers_may_is_let_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEADERS_TIMEOUT_S", 0.1)
    async with gate(path) as (gateway, address), browser(address) as client:
        async with client.stream("GET", "/v1/stream") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == "begin"
            await asyncio.sleep(0.4)
            gateway.go_on.set()
            assert await anext(lines) == "end"
        assert (await client.get("/health")).status_code == 200


async def test_an_answer_that_nobody_reads_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "STALLED_WRITE_TIMEOUT_S", 0.3)
    async with gate(path) as (gateway, address):
        loop = asyncio.get_running_loop()
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(b"GET /v1/flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
            began = loop.time()
            async with asyncio.timeout(10):
                while gateway.streams == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                while gateway.streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert loop.time() - began > 0.3
