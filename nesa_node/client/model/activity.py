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

from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.wait_tracking import WaitStatus, WaitTracker, current_tracker
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
    """Mean rate over the last `RATE_WINDOW_S` seconds, all rows together."""
    failovers: int
    waits_for: WaitStatus | None = None
    """What the session waits for, if it has waited for at least two seconds."""
    failed: tuple[tuple[PeerId, float], ...] = ()
    """Nodes that failed in this session, each with the time of its last failure."""
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailover:
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

    def ended_sessions(self) -> Sequence[SessionActivity]:
        """The last 100 sessions that have ended, in the order of their ends."""
        ...

    def failovers(self) -> Sequence[SessionFailover]:
        """The last 200 failovers, the oldest first."""
        ...


MAX_FAILOVERS = 200
MAX_ENDED_SESSIONS = 100
RATE_WINDOW_S = 5
"""Window of `tokens_per_s`, in seconds."""


class RunningSession:
    """State of one open session, updated by the thread that runs it at each token."""

    def __init__(self, model_id: ModelId, prompt_tokens: int, clock: Callable[[], float]) -> None:
        self.id = secrets.token_hex(8)
        self.waits = WaitTracker(outer=current_tracker())
        self._model_id = model_id
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._began_at = time.time()
        self._state: SessionState = "waiting"
        self._session: InferenceSession | None = None
        self._hops: tuple[Hop, ...] = ()
        self._generated_tokens = 0
        self._rate_samples: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW_S)
        self._next_sample_at = 0.0

    def mark_opened(self, session: InferenceSession) -> None:
        """Set the state to "prefill": the session has its chain."""
        self._session = session
        self._state = "prefill"

    def mark_prompt_read(self) -> None:
        """Set the state to "decode": the prompt is computed."""
        self._state = "decode"
        self._hops = () if self._session is None else self._session.hops
        self._record_rate(self._clock())

    def add_tokens(self, count: int) -> None:
        """Add `count` generated tokens, of all rows together."""
        self._generated_tokens += count
        now = self._clock()
        if now >= self._next_sample_at:
            self._record_rate(now)

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
            generated_tokens=self._generated_tokens,
            tokens_per_s=self._rate(),
            failovers=0 if session is None else len(session.failovers),
            waits_for=self.waits.slow_wait(),
            failed=tuple(self.waits.failure_times.copy().items()),
        )

    def failovers(self) -> tuple[SessionFailover, ...]:
        losses = () if self._session is None else self._session.failovers
        return tuple(
            SessionFailover(at=loss.at, session_id=self.id, lost=loss.lost, took_ms=loss.took_ms)
            for loss in losses
        )

    def _record_rate(self, now: float) -> None:
        self._rate_samples.append((now, self._generated_tokens))
        self._next_sample_at = now + 1

    def _rate(self) -> float:
        try:
            then, count = self._rate_samples[0]
        except IndexError:
            return 0.0
        elapsed = self._clock() - then
        return (self._generated_tokens - count) / elapsed if elapsed > 0 else 0.0


class ActivityTracker:
    """Registry of this process's sessions. Safe for any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._running: dict[str, RunningSession] = {}
        self._ended_failovers: deque[SessionFailover] = deque(maxlen=MAX_FAILOVERS)
        self._ended: deque[SessionActivity] = deque(maxlen=MAX_ENDED_SESSIONS)

    @contextmanager
    def track_session(self, model_id: ModelId, *, prompt_tokens: int) -> Iterator[RunningSession]:
        """Register a session until the block ends; waits inside are recorded as the session's."""
        running = RunningSession(model_id, prompt_tokens, self._clock)
        with self._guard:
            self._running[running.id] = running
        try:
            with running.waits.activate():
                yield running
        finally:
            with self._guard:
                del self._running[running.id]
                self._ended_failovers.extend(running.failovers())
                self._ended.append(replace(running.activity(), ended_at=time.time()))

    def sessions(self) -> Sequence[SessionActivity]:
        with self._guard:
            running = list(self._running.values())
        return [one.activity() for one in running]

    def ended_sessions(self) -> Sequence[SessionActivity]:
        with self._guard:
            return tuple(self._ended)

    def failovers(self) -> Sequence[SessionFailover]:
        with self._guard:
            running, found = list(self._running.values()), list(self._ended_failovers)
        for one in running:
            found += one.failovers()
        return sorted(found, key=lambda failover: failover.at)[-MAX_FAILOVERS:]
