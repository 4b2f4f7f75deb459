"""Feed of the dashboard's state as server-sent events: all of it first, then changes.

A viewer's only state is the version that it has; it is sent the changes since then when it can
receive. So viewers share one computation, and a slow one needs no queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive, Scope, Send

from nesa_node.dashboard.sections import Sections
from nesa_node.web.doorman import current_caller
from nesa_node.web.problem import Problem
from nesa_node.web.shares import Shares

MAX_VIEWERS = 16
LEAST_PAUSE_S = 1.0
BEAT_S = 5.0
"""Interval of heartbeats, by which viewers know that the connection is alive."""
STALLED_S = 60.0
"""Timeout for sending one event; a viewer that exceeds it is disconnected."""
_RETRY_S = 10.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies would otherwise buffer events.
    (b"x-accel-buffering", b"no"),
]


class Feed:
    """Feed of `sections`: change them, then call `publish`. `close` ends all streams for good."""

    def __init__(self, sections: Sections, *, max_viewers: int = MAX_VIEWERS) -> None:
        self.sections = sections
        self._closing = asyncio.Event()
        self._shares = Shares(max_viewers, "viewers of this page", retry_after_s=_RETRY_S)
        self._news = asyncio.Event()

    @property
    def viewers(self) -> int:
        return self._shares.held

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def publish(self) -> None:
        """Wake all streams that wait for a change."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        self._closing.set()
        self.publish()

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Hold a viewer's slot; `Problem` as for `Shares`, and 503 once the feed is closed."""
        if self.closed:
            raise Problem(503, "this page is being closed; try again later", retry_after_s=_RETRY_S)
        with self._shares.holding(current_caller()):
            yield

    async def pause(self) -> None:
        """Wait for `LEAST_PAUSE_S`, or until the feed is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAST_PAUSE_S):
                await self._closing.wait()

    async def news_since(self, version: int) -> bool:
        """Wait for a later version, at most `BEAT_S`; False if there is none."""
        try:
            async with asyncio.timeout(BEAT_S):
                while self.sections.version <= version and not self.closed:
                    await self._news.wait()
        except TimeoutError:
            return False
        return True


class EventStream:
    """ASGI response with events `state` (JSON) and `clock` (seconds since the epoch)."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.viewing():
                async with asyncio.TaskGroup() as group:
                    leaving = group.create_task(_gone(receive))
                    telling = group.create_task(self._tell(send))
                    leaving.add_done_callback(lambda _: telling.cancel())
                    telling.add_done_callback(lambda _: leaving.cancel())
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def _tell(self, send: Send) -> None:
        feed, version = self._feed, None
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            # The time after which a browser's EventSource reconnects.
            await _send(send, b"retry: 2000\n\n")
            while not feed.closed:
                # In this order a change between the two reads is sent twice, not lost.
                newest = feed.sections.version
                news, version = feed.sections.since(version), newest
                await _send(send, _clock() + b"event: state\ndata: " + news + b"\n\n")
                await feed.pause()
                while not await feed.news_since(version):
                    await _send(send, _clock())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return  # the viewer is gone


def _clock() -> bytes:
    """Event `clock`, since records expire by the swarm's time and browsers' clocks may be wrong."""
    return f"event: clock\ndata: {time.time():.3f}\n\n".encode()


async def _send(send: Send, body: bytes) -> None:
    async with asyncio.timeout(STALLED_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
