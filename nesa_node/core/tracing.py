"""Distributed tracing of requests. Without a tracer it costs next to nothing.

Spans go to the tracer set by `set_tracer`; `cli/services/trace_export.py` has the one that exports
to OpenTelemetry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
CONTEXT_BYTES = TRACE_ID_BYTES + SPAN_ID_BYTES
_TRACEPARENT_PATTERN = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids of a span that is the parent of other spans, also in other processes."""

    trace_id: bytes
    span_id: bytes

    @classmethod
    def parse(cls, data: bytes) -> TraceContext | None:
        """Parse the bytes of `__bytes__`, from an untrusted peer; None if malformed."""
        trace_id, span_id = data[:TRACE_ID_BYTES], data[TRACE_ID_BYTES:]
        if len(data) != CONTEXT_BYTES or not any(trace_id) or not any(span_id):
            return None
        return cls(trace_id, span_id)

    @classmethod
    def parse_header(cls, text: str) -> TraceContext | None:
        """Parse a W3C `traceparent` header; None if malformed or not sampled."""
        matched = _TRACEPARENT_PATTERN.fullmatch(text)
        if matched is None or not int(matched[3], 16) & 1:
            return None
        return cls.parse(bytes.fromhex(matched[1] + matched[2]))

    def __bytes__(self) -> bytes:
        return self.trace_id + self.span_id


class TraceSpan(Protocol):
    """Span of a trace: a timed operation, from its start to `end`."""

    @property
    def context(self) -> TraceContext | None:
        """Context for child spans; None without a tracer."""
        ...

    def set_attributes(self, attributes: Attributes) -> None: ...

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        """End the span now or `at` Unix seconds. Only the first call has an effect."""
        ...


class Tracer(Protocol):
    """Receiver of spans. Must not block or raise, and buffers a bounded number of spans."""

    def start_span(
        self,
        name: str,
        parent: TraceContext | None,
        began_at: float | None,
        attributes: Attributes,
    ) -> TraceSpan: ...

    def close(self) -> None:
        """Export the remaining spans; may take seconds."""
        ...


class _NoSpan:
    context = None

    def set_attributes(self, attributes: Attributes) -> None:
        pass

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        pass


NO_SPAN: TraceSpan = _NoSpan()
_tracer: Tracer | None = None
_current: ContextVar[TraceContext | None] = ContextVar("nesa_trace", default=None)


def set_tracer(tracer: Tracer | None) -> None:
    """Set the process's tracer, None for no tracing; the previous one is closed."""
    global _tracer
    before, _tracer = _tracer, tracer
    if before is not None:
        before.close()


def current_context() -> TraceContext | None:
    """Context of the current span of this task."""
    return _current.get()


def start_span(
    name: str,
    parent: TraceContext | None = None,
    attributes: Attributes = MappingProxyType({}),
    *,
    began_at: float | None = None,
) -> TraceSpan:
    """Start a span, which the caller ends; without a parent it starts a new trace."""
    if _tracer is None:
        return NO_SPAN
    return _tracer.start_span(name, parent, began_at, attributes)


@contextmanager
def use_span(span: TraceSpan) -> Iterator[TraceSpan]:
    """Make `span` the current one, end it on exit, and record the type of an exception."""
    before = _current.set(span.context)
    try:
        yield span
    except Exception as error:
        span.end(error=type(error).__name__)
        raise
    finally:
        _current.reset(before)
        span.end()
