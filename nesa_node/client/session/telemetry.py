"""Traces and metrics of sessions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, get_args

from nesa_node.client.recovery.suspicion import SuspicionEvent
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.verification.audit_history import AuditOutcome
from nesa_node.core import tracing
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import (
    AUDITS,
    FAILOVERS,
    OPEN_SESSIONS,
    RECOVERY_TIME,
    STEP_LATENCY,
    SUSPICIONS,
    MetricSample,
)
from nesa_node.core.tracing import NO_SPAN, TraceSpan

MAX_TRACED_PHASES = 64
"""Most phases and recoveries of a session with a span of their own."""


class SessionTrace:
    """Trace of one session. Consecutive decode steps share a span, so that its size is bounded."""

    def __init__(self, request: RouteRequest, name: str) -> None:
        self._span = tracing.start_span(
            "session",
            tracing.current_context(),
            {
                "nesa.session": name,
                "nesa.model": request.model_id,
                "nesa.route": request.options.routing,
                "nesa.rows": request.rows,
                "nesa.blocks": str(request.span),
            },
        )
        self.is_enabled = self._span.context is not None
        """Whether tracing is on; if not, no other member needs to be used."""
        chained = self.is_enabled and request.is_chain
        self.context = bytes(self._span.context) if chained and self._span.context else b""
        """Trace context sent to nodes. Empty in a star: its nodes must not be able to match
        sessions."""
        self._phase_count = 0
        self._phase = ""
        self._phase_span = NO_SPAN
        self._steps = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._stepped_at = 0.0

    def phase(self, name: str) -> AbstractContextManager[TraceSpan]:
        """Span around opening or repairing the chain."""
        return tracing.use_span(self._start_phase(name, None))

    def record_step(self, phase: str, tokens: int, seconds: float) -> None:
        """Add a step of `tokens` tokens to the span of its phase."""
        self._stepped_at = time.time()
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
            self._phase_span = self._start_phase(phase, self._stepped_at - seconds)
        self._steps += 1
        self._tokens += tokens
        self._busy_s += seconds

    def end(self, hops: int) -> None:
        self._end_phase()
        self._span.set_attributes({"nesa.hops": hops})
        self._span.end()

    def _start_phase(self, name: str, began_at: float | None) -> TraceSpan:
        self._phase_count += 1
        if not self.is_enabled or self._phase_count > MAX_TRACED_PHASES:
            return NO_SPAN
        return tracing.start_span(name, self._span.context, began_at=began_at)

    def _end_phase(self) -> None:
        if self._phase:
            self._phase_span.set_attributes(
                {
                    "nesa.steps": self._steps,
                    "nesa.tokens": self._tokens,
                    "nesa.seconds_in_steps": self._busy_s,
                }
            )
            self._phase_span.end(at=self._stepped_at)
        self._phase, self._steps, self._tokens, self._busy_s = "", 0, 0, 0.0


FailoverReason = Literal["failed", "left", "slow"]


class SessionMetrics:
    """Counters that all sessions of a connection update, on its event loop."""

    def __init__(self) -> None:
        self.open = 0
        self.step_s = STEP_LATENCY.new_histogram()
        self.recovery_s = RECOVERY_TIME.new_histogram()
        self.failovers: Counter[FailoverReason] = Counter()
        self.suspicions: Counter[SuspicionEvent] = Counter()
        """Suspicions by outcome: raised, then withdrawn or confirmed."""


def audit_samples(model_id: ModelId, outcomes: Counter[AuditOutcome]) -> Iterator[MetricSample]:
    """Prometheus samples of a client's audits. Thread-safe."""
    for outcome in get_args(AuditOutcome):
        yield MetricSample(AUDITS, (model_id, outcome), outcomes[outcome])


def session_samples(model_id: ModelId, metrics: SessionMetrics) -> Iterator[MetricSample]:
    """Prometheus samples of a client's sessions. Thread-safe."""
    model = (model_id,)
    yield MetricSample(OPEN_SESSIONS, model, metrics.open)
    yield MetricSample(STEP_LATENCY, model, metrics.step_s)
    yield MetricSample(RECOVERY_TIME, model, metrics.recovery_s)
    for reason in get_args(FailoverReason):
        yield MetricSample(FAILOVERS, (*model, reason), metrics.failovers[reason])
    for event in get_args(SuspicionEvent):
        yield MetricSample(SUSPICIONS, (*model, event), metrics.suspicions[event])
