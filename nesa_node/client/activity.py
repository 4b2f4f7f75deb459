"""Activity of this process's sessions, for the dashboard, without prompts and generated text."""

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
    """State of one session. Times are Unix time in seconds."""

    id: str
    model_id: ModelId
    state: SessionState
    """"waiting" for a chain or for free cache, then "prefill", then "decode"."""
    hops: tuple[Hop, ...]
    began_at: float
    prompt_tokens: int
    generated_tokens: int
    tokens_per_s: float
    """Mean rate over the last `RATE_OVER` seconds, all rows together."""
    failovers: int
    waits_for: Wait | None = None
    """What the session waits for, if it has waited for at least two seconds."""
    failed: tuple[tuple[PeerId, float], ...] = ()
    """Nodes that failed in this session, each with the time of its last failure."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """Replacement of nodes in a session: `lost` left its chain, by failing or by leaving."""

    at: float
    session_id: str
    lost: tuple[PeerId, ...]
    took_ms: float


class Activity(Protocol):
    """Read-only view of sessions. Called from the dashboard's event loop at any time."""

    def sessions(self) -> Sequence[SessionActivity]:
        """Open sessions, the oldest first."""
        ...

    def ended(self) -> Sequence[SessionActivity]:
        """The last 100 sessions that have ended, in the order of their ends."""
        ...

    def failovers(self) -> Sequence[Failover]:
        """The last 200 failovers, the oldest first."""
        ...


MOST_FAILOVERS = 200
MOST_ENDED = 100
RATE_OVER = 5
"""Window of `tokens_per_s`, in seconds."""


class Running:
    """State of one open session, updated by the thread that runs it at each token."""

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
        """Set the state to "prefill": the session has its chain."""
        self._session = session
        self._state = "prefill"

    def read_prompt(self) -> None:
        """Set the state to "decode": the prompt is computed."""
        self._state = "decode"
        self._hops = () if self._session is None else self._session.hops
        self._mark(self._clock())

    def generated(self, count: int) -> None:
        """Add `count` generated tokens, of all rows together."""
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
            # A closed session has no hops: the last known ones stay.
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
    """Registry of this process's sessions. Safe for any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._running: dict[str, Running] = {}
        self._past: deque[Failover] = deque(maxlen=MOST_FAILOVERS)
        self._ended: deque[SessionActivity] = deque(maxlen=MOST_ENDED)

    @contextmanager
    def running(self, model_id: ModelId, *, prompt_tokens: int) -> Iterator[Running]:
        """Register a session until the block ends. Waits inside the block are recorded as the
        session's.
        """
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
