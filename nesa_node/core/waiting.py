"""Tracking of what a session, request or command currently waits for, to show it to users.

Code that may wait opens a `waiting(...)` context. A user interface (stderr, an event stream, the
dashboard) creates a `Waits`, runs the work in its `current()`, and polls `slow()`. Context
variables carry the tracker into tasks and threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from nesa_node.core.ids import PeerId
from nesa_node.core.span import Span

SILENT_S = 2.0
"""Shortest wait that is shown, in seconds."""
MAX_NAMED = 4
"""Most spans or nodes that a text names; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """State of one wait. Holds no text from peers: only own words, spans and checked peer ids.

    `since` is in Unix seconds, `limit_s` counts from there; None without a limit.
    """

    what: str
    """Completes the phrase "waiting for ..."."""
    since: float
    blocks: tuple[Span, ...] = ()
    peers: tuple[PeerId, ...] = ()
    limit_s: float | None = None

    @property
    def subject(self) -> tuple[str, tuple[Span, ...], tuple[PeerId, ...]]:
        """Identity of a wait across attempts: all but its times."""
        return self.what, self.blocks, self.peers

    def text(self, now: float) -> str:
        """One line such as `waiting for room: blocks 10:20, node …x, 4 s of at most 600 s`."""
        waited_s = max(now - self.since, 0.0)
        details = [_named("blocks", "blocks", [str(span) for span in self.blocks])]
        details.append(_named("node", "nodes", [f"…{peer[-6:]}" for peer in self.peers]))
        if self.limit_s is None or waited_s > self.limit_s:
            details.append(f"{waited_s:.0f} s so far")
        else:
            details.append(f"{waited_s:.0f} s of at most {self.limit_s:.0f} s")
        return f"waiting for {self.what}: {', '.join(filter(None, details))}"


class Waiting:
    """Context manager of an open wait, which the waiting code updates.

    Each step of a session opens one, so texts are made only when they are shown.
    """

    __slots__ = ("_clock", "_waits", "blocks", "limit_s", "peers", "since", "what")

    def __init__(
        self, what: str, blocks: Sequence[Span], peers: Sequence[PeerId], limit_s: float | None
    ) -> None:
        self.what, self.blocks, self.peers, self.limit_s = what, blocks, peers, limit_s
        self._waits = _CURRENT.get()
        self._clock = time.time if self._waits is None else self._waits.clock
        self.since = self._clock()

    def __enter__(self) -> Waiting:
        if self._waits is not None:
            self._waits.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._waits is not None:
            self._waits.remove(self)

    def renew(self) -> None:
        """Restart the wait's time, after progress."""
        self.since = self._clock()

    def change(
        self,
        what: str,
        *,
        blocks: Sequence[Span] = (),
        peers: Sequence[PeerId] = (),
        left_s: float | None = None,
    ) -> None:
        """Change what is waited for; the new wait may take `left_s` from now."""
        self.what, self.blocks, self.peers = what, blocks, peers
        self.limit_s = None if left_s is None else self._clock() - self.since + left_s

    def wait(self) -> Wait:
        return Wait(
            what=self.what,
            since=self.since,
            blocks=tuple(self.blocks),
            peers=tuple(self.peers),
            limit_s=self.limit_s,
        )


class Waits:
    """Open waits of one session, request or command. Thread-safe.

    Waits are also added to `outer`, the tracker of the enclosing work.
    """

    def __init__(
        self, *, outer: Waits | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._outer = outer
        # Appending, removing and copying are single operations of the interpreter: no lock.
        self._open: list[Waiting] = []
        self.failed: dict[PeerId, float] = {}
        """Nodes that failed during a wait, with the Unix time of their last failure."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Track waits opened in the context, and in tasks and threads started in it."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def slow(self, after_s: float = SILENT_S) -> Wait | None:
        """The youngest (innermost, so most specific) wait that has lasted `after_s` or longer."""
        until = self.clock() - after_s
        slow = [each for each in list(self._open) if each.since <= until]
        return max(slow, key=lambda each: each.since).wait() if slow else None

    def note_failure(self, peer: PeerId) -> None:
        self.failed[peer] = self.clock()
        if self._outer is not None:
            self._outer.note_failure(peer)

    def add(self, waiting: Waiting) -> None:
        self._open.append(waiting)
        if self._outer is not None:
            self._outer.add(waiting)

    def remove(self, waiting: Waiting) -> None:
        self._open.remove(waiting)
        if self._outer is not None:
            self._outer.remove(waiting)


_CURRENT: ContextVar[Waits | None] = ContextVar("waits", default=None)


def current_waits() -> Waits | None:
    """Tracker of the current context."""
    return _CURRENT.get()


def note_failure(peer: PeerId) -> None:
    """Record in the current tracker that `peer` failed."""
    waits = _CURRENT.get()
    if waits is not None:
        waits.note_failure(peer)


@contextmanager
def unheard() -> Iterator[None]:
    """Track no waits in the context: background work that does not hold up the session."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def waiting(
    what: str,
    *,
    blocks: Sequence[Span] = (),
    peers: Sequence[PeerId] = (),
    limit_s: float | None = None,
) -> Waiting:
    """Context manager of something that may take long. `what` completes "waiting for ..."."""
    return Waiting(what, blocks, peers, limit_s)


def _named(one: str, more: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = " ".join(names[:MAX_NAMED])
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{one if len(names) == 1 else more} {shown}{rest}"
