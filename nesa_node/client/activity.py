"""What the sessions of this process do now, for whoever shows it. Never what they say."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from nesa_node.client.inference import InferenceSession
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.waiting import Wait, Waits, current_waits
from nesa_node.routing.chains import Hop

SessionState = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionActivity:
    """One session; times are seconds since the epoch."""

    id: str
    model_id: ModelId
    state: SessionState
    """`waiting` for a chain or for room, then computing the prompt, then the answer."""
    hops: tuple[Hop, ...]
    began_at: float
    prompt_tokens: int
    generated_tokens: int
    tokens_per_s: float
    """Over the last seconds."""
    failovers: int
    waits_for: Wait | None = None
    """What holds it up, if that has lasted two seconds."""
    failed: tuple[tuple[PeerId, float], ...] = ()
    """Nodes that failed it, with the time when they did so last."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """A session went on through others: `lost` left its chain, by failing or by leaving."""

    at: float
    session_id: str
    lost: tuple[PeerId, ...]
    took_ms: float


class Activity(Protocol):
    """Read at any time, from the event loop of whoever shows it."""

    def sessions(self) -> Sequence[SessionActivity]:
        """Those that are open, the oldest first."""
        ...

    def ended(self) -> Sequence[SessionActivity]:
        """The last ones that are over, at most 100, in the order of their ends."""
        ...

    def failovers(self) -> Sequence[Failover]:
        """The last ones, at most 200, the oldest first."""
        ...


MOST_FAILOVERS = 200
MOST_ENDED = 100
RATE_OVER = 5
"""Seconds."""


class Running:
    """One session, as whoever runs it reports. Its methods cost next to nothing."""

    def __init__(
        self,
        model_id: ModelId,
        prompt_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.waits = Waits(outer=current_waits())
        self._model_id = model_id
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._began_at = time.time()
        self._state: SessionState = "waiting"
        self._session: InferenceSession | None = None
        self._hops: tuple[Hop, ...] = ()
        self._generated = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_OVER)
        self._next_mark = 0.0

    def opened(self, session: InferenceSession) -> None:
        """It has its chain, and computes the prompt."""
        self._session = session
        self._state = "prefill"

    def read_prompt(self) -> None:
        """Tokens follow."""
        self._state = "decode"
        self._hops = () if self._session is None else self._session.hops
        self._mark(self._clock())

    def generated(self, count: int) -> None:
        """So many more tokens, of all rows together."""
        self._generated += count
        now = self._clock()
        if now >= self._next_mark:
            self._mark(now)

    def activity(self) -> SessionActivity:
        session = self._session
        return SessionActivity(
            id=self.id,
            model_id=self._model_id,
            state=self._state,
            # A session that is closed has none any more.
            hops=(session.hops if session is not None else ()) or self._hops,
            began_at=self._began_at,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            tokens_per_s=self._rate(),
            failovers=0 if session is None else len(session.losses),
            waits_for=self.waits.slow(),
            failed=tuple(self.waits.failed.copy().items()),
        )

    def failovers(self) -> tuple[Failover, ...]:
        losses = () if self._session is None else self._session.losses
        return tuple(
            Failover(at=loss.at, session_id=self.id, lost=loss.lost, took_ms=loss.took_ms)
            for loss in losses
        )

    def _mark(self, now: float) -> None:
        self._marks.append((now, self._generated))
        self._next_mark = now + 1

    def _rate(self) -> float:
        try:
            then, count = self._marks[0]
        except IndexError:
            return 0.0
        elapsed = self._clock() - then
        return (self._generated - count) / elapsed if elapsed > 0 else 0.0


class ActivityBook:
    """An `Activity` that sessions are reported to. Safe for any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._running: dict[str, Running] = {}
        self._past: deque[Failover] = deque(maxlen=MOST_FAILOVERS)
        self._ended: deque[SessionActivity] = deque(maxlen=MOST_ENDED)

    @contextmanager
    def running(self, model_id: ModelId, *, prompt_tokens: int) -> Iterator[Running]:
        """A session, from its wish for a chain to its end. In here its waits are the session's."""
        running = Running(model_id, prompt_tokens, self._clock)
        with self._guard:
            self._running[running.id] = running
        try:
            with running.waits.current():
                yield running
        finally:
            with self._guard:
                del self._running[running.id]
                self._past.extend(running.failovers())
                self._ended.append(replace(running.activity(), ended_at=time.time()))

    def sessions(self) -> Sequence[SessionActivity]:
        """See `Activity.sessions`."""
        with self._guard:
            running = list(self._running.values())
        return [one.activity() for one in running]

    def ended(self) -> Sequence[SessionActivity]:
        """See `Activity.ended`."""
        with self._guard:
            return tuple(self._ended)

    def failovers(self) -> Sequence[Failover]:
        """See `Activity.failovers`."""
        with self._guard:
            running, past = list(self._running.values()), list(self._past)
        found = past + [failover for one in running for failover in one.failovers()]
        return sorted(found, key=lambda failover: failover.at)[-MOST_FAILOVERS:]
