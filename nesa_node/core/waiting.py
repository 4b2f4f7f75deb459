"""What a session, a request or a command waits for now, for every surface that says so.

Code that may wait opens a `waiting(...)` around it. The surface that shows waits (stderr, a stream
of events, the dashboard's page) makes a `Waits`, lets the work run in its `current()`, and asks
`slow()` whenever it likes. Context variables carry it into tasks and threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

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
    """An open wait, changed by the code that waits."""

    def __init__(self, wait: Wait, clock: Callable[[], float]) -> None:
        self.wait = wait
        self._clock = clock

    def renew(self) -> None:
        """Something came: the wait begins anew."""
        self.wait = replace(self.wait, since=self._clock())

    def change(
        self,
        what: str,
        *,
        blocks: Sequence[Span] = (),
        peers: Sequence[PeerId] = (),
        left_s: float | None = None,
    ) -> None:
        """It goes on, for something else, which may take `left_s` from now."""
        since = self.wait.since
        limit_s = None if left_s is None else self._clock() - since + left_s
        self.wait = Wait(
            what=what, blocks=tuple(blocks), peers=tuple(peers), since=since, limit_s=limit_s
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
        self._guard = threading.Lock()
        self._open: list[Waiting] = []

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
        with self._guard:
            waits = [each.wait for each in self._open]
        return max((w for w in waits if w.since <= until), key=lambda w: w.since, default=None)

    def add(self, waiting: Waiting) -> None:
        with self._guard:
            self._open.append(waiting)
        if self._outer is not None:
            self._outer.add(waiting)

    def remove(self, waiting: Waiting) -> None:
        with self._guard:
            self._open.remove(waiting)
        if self._outer is not None:
            self._outer.remove(waiting)


_CURRENT: ContextVar[Waits | None] = ContextVar("waits", default=None)


def current_waits() -> Waits | None:
    """Where waits that are opened here come to."""
    return _CURRENT.get()


@contextmanager
def unheard() -> Iterator[None]:
    """Waits that are opened in here are told nowhere: work beside the session, which goes on."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def waiting(
    what: str,
    *,
    blocks: Sequence[Span] = (),
    peers: Sequence[PeerId] = (),
    limit_s: float | None = None,
) -> Iterator[Waiting]:
    """Around what may take long. `what` follows "waiting for", in our own words."""
    waits = _CURRENT.get()
    clock = time.time if waits is None else waits.clock
    wait = Wait(what=what, blocks=tuple(blocks), peers=tuple(peers), since=clock(), limit_s=limit_s)
    opened = Waiting(wait, clock)
    if waits is None:
        yield opened
        return
    waits.add(opened)
    try:
        yield opened
    finally:
        waits.remove(opened)


def _named(one: str, more: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = " ".join(names[:MAX_NAMED])
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{one if len(names) == 1 else more} {shown}{rest}"
