"""Feed of the dashboard's state as server-sent events: all of it first, then changes.

A viewer's only state is the version that it has; it is sent the changes since then when it can
receive. So viewers share one computation, and a slow one needs no queue.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import HttpProblem
from nesa_node.web.rate_limits import FairSlots

MAX_REMEMBERED_REMOVALS = 4096
"""Maximum removals in memory; a reader that missed older ones gets the whole document."""

_Entry = tuple[int, msgspec.Raw]


class VersionedSections:
    """Sections of entries, as JSON: `{"version", "full", "sections": {name: {key: value}}}`.

    A reader with a version gets the entries that changed after it, null for removed ones; there is
    no state per reader. Thread-safe. To know the version of the result of `since`, read `version`
    before the call.
    """

    def __init__(self) -> None:
        self.version = 0
        self._sections: dict[str, dict[str, _Entry]] = {}
        self._removed: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._oldest_known_version = 0
        self._encoded_since: dict[int | None, bytes] = {}
        self._lock = threading.RLock()

    def replace_entries(self, name: str, entries: Mapping[str, Any]) -> bool:
        """Replace all entries of a section; returns whether anything changed."""
        raws = _encode_entries(entries)
        with self._lock:
            changed = self._set_raw(name, raws)
            section = self._sections[name]
            gone = [key for key in section if key not in entries]
            if gone:
                version = self._bump_version(changed)
                for key in gone:
                    del section[key]
                    self._removed[name, key] = version
                while len(self._removed) > MAX_REMEMBERED_REMOVALS:
                    self._oldest_known_version = self._removed.popitem(last=False)[1]
        return changed or bool(gone)

    def set_entries(
        self, name: str, entries: Mapping[str, Any], *, keep: int | None = None
    ) -> bool:
        """Set some entries of a section; returns whether anything changed.

        `keep` limits a growing section to its newest entries. Readers are not told of the removals:
        they apply the same limit.
        """
        raws = _encode_entries(entries)
        with self._lock:
            changed = self._set_raw(name, raws)
            section = self._sections[name]
            if keep is not None and len(section) > keep:
                for key in list(itertools.islice(section, len(section) - keep)):
                    del section[key]
        return changed

    def encode_since(self, version: int | None) -> bytes:
        """JSON of the changes since `version`, or of everything if that is None or unknown."""
        with self._lock:
            if version is not None and not self._oldest_known_version <= version <= self.version:
                version = None
            if version not in self._encoded_since:
                self._encoded_since[version] = self._encode(version)
            return self._encoded_since[version]

    def _set_raw(self, name: str, raws: Mapping[str, msgspec.Raw]) -> bool:
        section = self._sections.setdefault(name, {})
        changed = False
        for key, raw in raws.items():
            if key in section and bytes(section[key][1]) == bytes(raw):
                continue
            section[key] = self._bump_version(changed), raw
            self._removed.pop((name, key), None)
            changed = True
        return changed

    def _bump_version(self, within: bool) -> int:
        """The version of a change; changes of one `set_entries` or `replace_entries` share one."""
        if not within:
            self.version += 1
            self._encoded_since.clear()
        return self.version

    def _encode(self, version: int | None) -> bytes:
        least = -1 if version is None else version
        news: dict[str, dict[str, msgspec.Raw | None]] = {}
        for name, section in self._sections.items():
            fresh = {key: raw for key, (changed, raw) in section.items() if changed > least}
            if fresh or version is None:
                news[name] = {**fresh}
        if version is not None:
            for (name, key), removed in self._removed.items():
                if removed > version:
                    news.setdefault(name, {})[key] = None
        return msgspec.json.encode(
            {"version": self.version, "full": version is None, "sections": news}
        )


def _encode_entries(entries: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    """Encode the entries, before the lock is taken."""
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in entries.items()}


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
