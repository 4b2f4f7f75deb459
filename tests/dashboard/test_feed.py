"""The feed over HTTP: what viewers are sent, and how many of them there may be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import AccessConfig
from nesa_node.dashboard import feed as module
from nesa_node.dashboard.app import Dashboard, make_app
from nesa_node.web.authenticator import caller_context
from nesa_node.web.key_store import KeyStore
from nesa_node.web.problem import HttpProblem
from nesa_node.web.server import serve_app, serve_authenticated
from tests.dashboard.records import record

ANY_PORT = HttpAddress("127.0.0.1", 0)
EVENTS = "/dashboard/events"


@pytest.fixture
async def shown() -> AsyncIterator[tuple[Dashboard, httpx.AsyncClient]]:
    dashboard = Dashboard(max_viewers=2)
    async with (
        serve_app(make_app(dashboard), ANY_PORT) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as client,
    ):
        try:
            yield dashboard, client
        finally:
            dashboard.feed.close()


class Events:
    """Server-sent events, one after the other."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def any(self) -> tuple[str, Any]:
        name = ""
        async with asyncio.timeout(10):
            async for line in self._lines:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    return name, json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has ended")

    async def state(self) -> Any:
        while True:
            name, data = await self.any()
            if name == "state":
                return data


@asynccontextmanager
async def watching(client: httpx.AsyncClient) -> AsyncIterator[Events]:
    async with client.stream("GET", EVENTS) as response:
        assert response.status_code == 200
        yield Events(response)


def see(dashboard: Dashboard, *peers: str, at: float) -> None:
    dashboard.state.update_records([record(peer, at=at) for peer in peers], at)
    dashboard.state.advance_time(at, None)
    dashboard.feed.publish()


async def test_viewer_gets_all_at_first_and_then_what_changes(
    shown: tuple[Dashboard, httpx.AsyncClient],
) -> None:
    dashboard, client = shown
    see(dashboard, "a", "b", at=1000)
    async with watching(client) as events:
        name, server_time = await events.any()
        assert (name, abs(server_time - time.time()) < 5) == ("clock", True)
        first = await events.state()
        assert first["full"]
        assert set(first["sections"]["nodes"]) == {"a", "b"}
        see(dashboard, "c", at=1001)
        second = await events.state()
        assert not second["full"]
        assert set(second["sections"]["nodes"]) == {"c"}
        assert "models" in second["sections"]
        dashboard.state.advance_time(1700, None)
        dashboard.feed.publish()
        third = await events.state()
        assert third["sections"]["nodes"] == {"a": None, "b": None, "c": None}
    assert events.response.headers["content-type"].startswith("text/event-stream")


async def test_many_changes_within_a_second_become_one_event(
    shown: tuple[Dashboard, httpx.AsyncClient],
) -> None:
    dashboard, client = shown
    see(dashboard, "a", at=1000)
    async with watching(client) as events:
        await events.state()
        began = time.monotonic()
        for number in range(40):
            see(dashboard, f"n{number}", at=1001 + number / 100)
        news = await events.state()
        assert time.monotonic() - began > 0.7
        assert len(news["sections"]["nodes"]) == 40


async def test_viewers_hear_something_where_nothing_changes(
    shown: tuple[Dashboard, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = shown
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.1)
    async with watching(client) as events:
        await events.state()
        assert [(await events.any())[0] for _ in range(3)] == ["clock"] * 3


async def test_number_of_viewers_is_bounded_and_places_become_free(
    shown: tuple[Dashboard, httpx.AsyncClient],
) -> None:
    dashboard, client = shown
    async with watching(client) as one, watching(client) as other:
        await one.state()
        await other.state()
        refused = await client.get(EVENTS)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "10"
        assert "try again" in refused.json()["error"]["message"]
    deadline = time.monotonic() + 5
    while dashboard.feed.num_viewers and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    async with watching(client) as again:
        assert (await again.state())["full"]


async def test_viewer_that_does_not_read_gets_the_newest_and_holds_up_nobody(
    shown: tuple[Dashboard, httpx.AsyncClient],
) -> None:
    dashboard, client = shown
    see(dashboard, "a", at=1000)
    port = client.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(f"GET {EVENTS} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    await writer.drain()
    async with watching(client) as events:
        await events.state()
        see(dashboard, "b", at=1001)
        assert set((await events.state())["sections"]["nodes"]) == {"b"}
    writer.close()
    await writer.wait_closed()
    assert reader.exception() is None


async def test_server_that_stops_ends_the_streams_at_once() -> None:
    dashboard = Dashboard()
    began = 0.0
    async with httpx.AsyncClient(timeout=10) as client:
        async with (
            serve_app(make_app(dashboard), ANY_PORT) as address,
            client.stream("GET", f"http://{address}{EVENTS}") as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            began = time.monotonic()
            dashboard.feed.close()
            async for _ in lines:
                pass
        assert time.monotonic() - began < 1
        assert dashboard.feed.num_viewers == 0


def test_a_key_that_keeps_many_pages_open_leaves_room_for_another() -> None:
    feed = Dashboard(max_viewers=16).feed
    with ExitStack() as stack:

        def view(caller: str, times: int = 1) -> None:
            with caller_context(caller):
                for _ in range(times):
                    stack.enter_context(feed.hold_viewer_slot())

        view("a", 16)
        view("b")
        with pytest.raises(HttpProblem) as refused:
            view("a")
        assert (refused.value.status, refused.value.retry_after_s) == (429, 10)
    assert feed.num_viewers == 0


async def test_pages_are_counted_by_the_key_that_opened_them(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    first, second = ({"authorization": f"Bearer {store.add(name)[1]}"} for name in ("a", "b"))
    dashboard = Dashboard(max_viewers=2)
    config = AccessConfig(keys_path=store.path)
    async with (
        serve_authenticated(make_app(dashboard), config, ANY_PORT, max_connections=16) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as client,
        client.stream("GET", EVENTS, headers=first),
        client.stream("GET", EVENTS, headers=first),
    ):
        async with client.stream("GET", EVENTS, headers=second) as response:
            assert response.status_code == 200
        assert (await client.get(EVENTS, headers=first)).status_code == 429
        dashboard.feed.close()
