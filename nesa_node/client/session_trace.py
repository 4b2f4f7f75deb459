"""Traces and metrics of sessions."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from nesa_node.client.request import RouteRequest
from nesa_node.core import tracing
from nesa_node.core.tracing import NO_SPAN, Span

MOST_PARTS = 64
"""Most phases and recoveries of a session with a span of their own."""


class SessionTrace:
    """Trace of one session. Consecutive decode steps share a span, so that its size is bounded."""

    def __init__(self, request: RouteRequest, name: str) -> None:
        self._span = tracing.start(
            "session",
            tracing.current(),
            {
                "nesa.session": name,
                "nesa.model": request.model_id,
                "nesa.route": request.mode,
                "nesa.rows": request.rows,
                "nesa.blocks": str(request.span),
            },
        )
        self.on = self._span.context is not None
        """Whether tracing is on; if not, no other member needs to be used."""
        chained = self.on and request.mode == "chain"
        self.told = bytes(self._span.context) if chained and self._span.context else b""
        """Trace context sent to nodes. Empty in a star: its nodes must not be able to match
        sessions."""
        self._parts = 0
        self._phase = ""
        self._phase_span = NO_SPAN
        self._steps = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._stepped_at = 0.0

    def part(self, name: str) -> AbstractContextManager[Span]:
        """Span around opening or repairing the chain."""
        return tracing.within(self._part(name, None))

    def stepped(self, phase: str, tokens: int, seconds: float) -> None:
        """Add a step of `tokens` tokens to the span of its phase."""
        self._stepped_at = time.time()
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
            self._phase_span = self._part(phase, self._stepped_at - seconds)
        self._steps += 1
        self._tokens += tokens
        self._busy_s += seconds

    def end(self, hops: int, error: str | None = None) -> None:
        self._end_phase()
        self._span.set({"nesa.hops": hops})
        self._span.end(error=error)

    def _part(self, name: str, began_at: float | None) -> Span:
        self._parts += 1
        if not self.on or self._parts > MOST_PARTS:
            return NO_SPAN
        return tracing.start(name, self._span.context, began_at=began_at)

    def _end_phase(self) -> None:
        if self._phase:
            self._phase_span.set(
                {
                    "nesa.steps": self._steps,
                    "nesa.tokens": self._tokens,
                    "nesa.seconds_in_steps": self._busy_s,
                }
            )
            self._phase_span.end(at=self._stepped_at)
        self._phase, self._steps, self._tokens, self._busy_s = "", 0, 0, 0.0
