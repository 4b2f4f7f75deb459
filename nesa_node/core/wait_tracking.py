"""Tracking of what a session, request or command currently waits for, to show it to users.

Code that may wait opens a `track_wait(...)` context. A user interface (stderr, an event stream, the
dashboard) creates a `WaitTracker`, runs the work in its `activate()`, and polls `slow_wait()`.
Context variables carry the tracker into tasks and threads.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from nesa_node.core.ids import PeerId, Span

MIN_REPORTED_WAIT_S = 2.0
"""Shortest wait that is shown, in seconds."""
MAX_NAMED_ITEMS = 4
"""Most spans or nodes that a text names; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStatus:
    """State of one wait. Holds no text from peers: only own words, spans and checked peer ids.

    `since` is in Unix seconds, `limit_s` counts from there; None without a limit.
    """

    what: str
    """Completes the phrase "waiting for ..."."""
    since: float
    blocks: tuple[Span, ...] = ()
    peers: tuple[PeerId, ...] = ()
    limit_s: float | None = None
    progress: str = ""

    @property
    def key(self) -> tuple[str, tuple[Span, ...], tuple[PeerId, ...]]:
        """Identity of a wait across attempts: all but its times and progress."""
        return self.what, self.blocks, self.peers

    def text(self, now: float) -> str:
        """One line such as `waiting for room: blocks 10:20, node …x, 4 s of at most 600 s`."""
        waited_s = max(now - self.since, 0.0)
        details = [_format_names("blocks", "blocks", [str(span) for span in self.blocks])]
        details.append(_format_names("node", "nodes", [f"…{peer[-6:]}" for peer in self.peers]))
        details.append(self.progress)
        if self.limit_s is None or waited_s > self.limit_s:
            details.append(f"{waited_s:.0f} s so far")
        else:
            details.append(f"{waited_s:.0f} s of at most {self.limit_s:.0f} s")
        return f"waiting for {self.what}: {', '.join(filter(None, details))}"


class ActiveWait:
    """Context manager of an open wait, which the waiting code updates.

    Each step of a session opens one, so texts are made only when they are shown.
    """

    __slots__ = ("_clock", "_tracker", "blocks", "limit_s", "peers", "progress", "since", "what")

    def __init__(
        self, what: str, blocks: Sequence[Span], peers: Sequence[PeerId], limit_s: float | None
    ) -> None:
        self.what, self.blocks, self.peers, self.limit_s = what, blocks, peers, limit_s
        self.progress = ""
        """How far it is, such as `block 2 of 30`."""
        self._tracker = _CURRENT.get()
        self._clock = time.time if self._tracker is None else self._tracker.clock
        self.since = self._clock()

    def __enter__(self) -> ActiveWait:
        if self._tracker is not None:
            self._tracker.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracker is not None:
            self._tracker.remove(self)

    def restart(self) -> None:
        """Restart the wait's time, after progress."""
        self.since = self._clock()

    def update(
        self,
        what: str,
        *,
        blocks: Sequence[Span] = (),
        peers: Sequence[PeerId] = (),
        remaining_s: float | None = None,
    ) -> None:
        """Change what is waited for; the new wait may take `remaining_s` from now."""
        if self._tracker is not None:
            self._tracker.count_time()
        self.what, self.blocks, self.peers = what, blocks, peers
        self.limit_s = None if remaining_s is None else self._clock() - self.since + remaining_s

    def status(self) -> WaitStatus:
        return WaitStatus(
            what=self.what,
            since=self.since,
            blocks=tuple(self.blocks),
            peers=tuple(self.peers),
            limit_s=self.limit_s,
            progress=self.progress,
        )


class WaitTracker:
    """Open waits of one session, request or command. Thread-safe.

    Waits are also added to `outer`, the tracker of the enclosing work.
    """

    def __init__(
        self, *, outer: WaitTracker | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._outer = outer
        # Appending, removing and copying are single operations of the interpreter: no lock.
        self._active: list[ActiveWait] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By what was waited for; of waits within each other only the innermost counts."""
        self._created_at = self._counted_at = clock()
        self.failure_times: dict[PeerId, float] = {}
        """Nodes that failed during a wait, with the Unix time of their last failure."""

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Track waits opened in the context, and in tasks and threads started in it."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def slow_wait(self, after_s: float = MIN_REPORTED_WAIT_S) -> WaitStatus | None:
        """The youngest (innermost, so most specific) wait that has lasted `after_s` or longer."""
        until = self.clock() - after_s
        slow = [each for each in list(self._active) if each.since <= until]
        return max(slow, key=lambda each: each.since).status() if slow else None

    def record_failure(self, peer: PeerId) -> None:
        self.failure_times[peer] = self.clock()
        if self._outer is not None:
            self._outer.record_failure(peer)

    @property
    def age_s(self) -> float:
        return self.clock() - self._created_at

    def count_time(self) -> None:
        """Add the time since the last call to the innermost wait."""
        now = self.clock()
        if active := list(self._active):
            self.seconds[active[-1].what] += now - self._counted_at
        self._counted_at = now

    def add(self, waiting: ActiveWait) -> None:
        self.count_time()
        self._active.append(waiting)
        if self._outer is not None:
            self._outer.add(waiting)

    def remove(self, waiting: ActiveWait) -> None:
        self.count_time()
        self._active.remove(waiting)
        if self._outer is not None:
            self._outer.remove(waiting)


_CURRENT: ContextVar[WaitTracker | None] = ContextVar("waits", default=None)


def current_tracker() -> WaitTracker | None:
    """Tracker of the current context."""
    return _CURRENT.get()


def record_failure(peer: PeerId) -> None:
    """Record in the current tracker that `peer` failed."""
    waits = _CURRENT.get()
    if waits is not None:
        waits.record_failure(peer)


@contextmanager
def untracked() -> Iterator[None]:
    """Track no waits in the context: background work that does not hold up the session."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def track_wait(
    what: str,
    *,
    blocks: Sequence[Span] = (),
    peers: Sequence[PeerId] = (),
    limit_s: float | None = None,
) -> ActiveWait:
    """Context manager of something that may take long. `what` completes "waiting for ..."."""
    return ActiveWait(what, blocks, peers, limit_s)


def _format_names(one: str, more: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = " ".join(names[:MAX_NAMED_ITEMS])
    rest = f" and {len(names) - MAX_NAMED_ITEMS} more" if len(names) > MAX_NAMED_ITEMS else ""
    return f"{one if len(names) == 1 else more} {shown}{rest}"
