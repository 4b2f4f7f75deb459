"""What a session, a request or a command waits for now, for every surface that says so.

Code that may wait opens a `waiting(...)` around it. The surface that shows waits (stderr, a stream
of events, the dashboard's page) makes a `Waits`, lets the work run in its `current()`, and asks
`slow()` whenever it likes. Context variables carry it into tasks and threads.
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
"""Waits are told once they have lasted so long."""
MAX_NAMED = 4
"""Blocks and nodes that a text names; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait. Only our own words and what was checked to be a span or a peer id: no remote text.

    `since` is seconds since the epoch, `limit_s` counts from there; None where nothing bounds it.
    """

    what: str
    """Follows "waiting for"."""
    since: float
    blocks: tuple[Span, ...] = ()
    peers: tuple[PeerId, ...] = ()
    limit_s: float | None = None

    @property
    def subject(self) -> tuple[str, tuple[Span, ...], tuple[PeerId, ...]]:
        """What tells it from another wait: its times change with every attempt."""
        return self.what, self.blocks, self.peers

    def text(self, now: float) -> str:
        """`waiting for room: blocks 10:20, node …x, 4 s of at most 600 s`, on one line."""
        waited_s = max(now - self.since, 0.0)
        details = [_named("blocks", "blocks", [str(span) for span in self.blocks])]
        details.append(_named("node", "nodes", [f"…{peer[-6:]}" for peer in self.peers]))
        if self.limit_s is None or waited_s > self.limit_s:
            details.append(f"{waited_s:.0f} s so far")
        else:
            details.append(f"{waited_s:.0f} s of at most {self.limit_s:.0f} s")
        return f"waiting for {self.what}: {', '.join(filter(None, details))}"


class Waiting:
    """An open wait, as long as its context lasts; changed by the code that waits.

    Each step of a session is one: it says what it is only where a surface asks.
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
        """Something came: the wait begins anew."""
        self.since = self._clock()

    def change(
        self,
        what: str,
        *,
        blocks: Sequence[Span] = (),
        peers: Sequence[PeerId] = (),
        left_s: float | None = None,
    ) -> None:
        """It goes on, for something else, which may take `left_s` from now."""
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
    """The open waits of one session, request or command. Safe for threads.

    With `outer`, that one has them, too.
    """

    def __init__(
        self, *, outer: Waits | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._outer = outer
        # Appending, removing and copying are single operations of the interpreter: no lock.
        self._open: list[Waiting] = []
        self.failed: dict[PeerId, float] = {}
        """Nodes that failed what waited for them, and when they did so last."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Waits that are opened in here, and in tasks and threads made in here, come to this."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def slow(self, after_s: float = SILENT_S) -> Wait | None:
        """The youngest wait that has lasted `after_s`: the most exact that is worth telling."""
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
    """Where waits that are opened here come to."""
    return _CURRENT.get()


def note_failure(peer: PeerId) -> None:
    """Whatever is waited for here, `peer` failed to do it."""
    waits = _CURRENT.get()
    if waits is not None:
        waits.note_failure(peer)


@contextmanager
def unheard() -> Iterator[None]:
    """Waits that are opened in here are told nowhere: work beside the session, which goes on."""
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
    """A context around what may take long. `what` follows "waiting for", in our own words."""
    return Waiting(what, blocks, peers, limit_s)


def _named(one: str, more: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = " ".join(names[:MAX_NAMED])
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{one if len(names) == 1 else more} {shown}{rest}"
