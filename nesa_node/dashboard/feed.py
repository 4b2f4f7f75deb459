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

from nesa_node.dashboard.sections import VersionedSections
from nesa_node.web.authenticator import current_caller
from nesa_node.web.fair_slots import FairSlots
from nesa_node.web.problem import HttpProblem

MAX_VIEWERS = 16
MIN_EVENT_INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
"""Interval of heartbeats, by which viewers know that the connection is alive."""
STALLED_VIEWER_TIMEOUT_S = 60.0
"""Timeout for sending one event; a viewer that exceeds it is disconnected."""
_RETRY_S = 10.0

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies would otherwise buffer events.
    (b"x-accel-buffering", b"no"),
]


class StateFeed:
    """Feed of `sections`: change them, then call `publish`. `close` ends all streams for good."""

    def __init__(self, sections: VersionedSections, *, max_viewers: int = MAX_VIEWERS) -> None:
        self.sections = sections
        self._closing = asyncio.Event()
        self._viewer_slots = FairSlots(max_viewers, "viewers of this page", retry_after_s=_RETRY_S)
        self._change = asyncio.Event()

    @property
    def num_viewers(self) -> int:
        return self._viewer_slots.held

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def publish(self) -> None:
        """Wake all streams that wait for a change."""
        news, self._change = self._change, asyncio.Event()
        news.set()

    def close(self) -> None:
        self._closing.set()
        self.publish()

    @contextmanager
    def hold_viewer_slot(self) -> Iterator[None]:
        """Hold a viewer's slot; `HttpProblem` as of `FairSlots`, or 503 once the feed is closed."""
        if self.closed:
            raise HttpProblem(
                503, "this page is being closed; try again later", retry_after_s=_RETRY_S
            )
        with self._viewer_slots.hold(current_caller()):
            yield

    async def wait_between_events(self) -> None:
        """Wait for `MIN_EVENT_INTERVAL_S`, or until the feed is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MIN_EVENT_INTERVAL_S):
                await self._closing.wait()

    async def wait_for_change(self, version: int) -> bool:
        """Wait for a later version, at most `HEARTBEAT_S`; False if there is none."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                while self.sections.version <= version and not self.closed:
                    await self._change.wait()
        except TimeoutError:
            return False
        return True


class StateStream:
    """ASGI response with events `state` (JSON) and `clock` (seconds since the epoch)."""

    def __init__(self, feed: StateFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.hold_viewer_slot():
                async with asyncio.TaskGroup() as group:
                    leaving = group.create_task(_wait_for_disconnect(receive))
                    telling = group.create_task(self._stream_events(send))
                    leaving.add_done_callback(lambda _: telling.cancel())
                    telling.add_done_callback(lambda _: leaving.cancel())
        except HttpProblem as problem:
            await problem.response()(scope, receive, send)

    async def _stream_events(self, send: Send) -> None:
        feed, version = self._feed, None
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            # The time after which a browser's EventSource reconnects.
            await _send(send, b"retry: 2000\n\n")
            while not feed.closed:
                # In this order a change between the two reads is sent twice, not lost.
                newest = feed.sections.version
                news, version = feed.sections.encode_since(version), newest
                await _send(send, _clock_event() + b"event: state\ndata: " + news + b"\n\n")
                await feed.wait_between_events()
                while not await feed.wait_for_change(version):
                    await _send(send, _clock_event())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return  # the viewer is gone


def _clock_event() -> bytes:
    """Event `clock`, since records expire by the swarm's time and browsers' clocks may be wrong."""
    return f"event: clock\ndata: {time.time():.3f}\n\n".encode()


async def _send(send: Send, body: bytes) -> None:
    async with asyncio.timeout(STALLED_VIEWER_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
