"""Traces: which parts of a request took how long, and where. Costs nothing where nobody traces.

Like events of the log, spans go where the program's own go: to the tracer that `use` named, if any.
What sends them is not known here (`cli/otel.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

TRACE_BYTES, SPAN_BYTES = 16, 8
CONTEXT_BYTES = TRACE_BYTES + SPAN_BYTES
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span that others, in other processes too, are part of."""

    trace_id: bytes
    span_id: bytes

    @classmethod
    def parse(cls, data: bytes) -> TraceContext | None:
        """What `bytes` made, or None: whoever sent it may have sent anything."""
        trace_id, span_id = data[:TRACE_BYTES], data[TRACE_BYTES:]
        if len(data) != CONTEXT_BYTES or not any(trace_id) or not any(span_id):
            return None
        return cls(trace_id, span_id)

    @classmethod
    def parse_header(cls, text: str) -> TraceContext | None:
        """A `traceparent` of the W3C that is to be recorded; None for anything else."""
        matched = _TRACEPARENT.fullmatch(text)
        if matched is None or not int(matched[3], 16) & 1:
            return None
        return cls.parse(bytes.fromhex(matched[1] + matched[2]))

    def __bytes__(self) -> bytes:
        return self.trace_id + self.span_id


class Span(Protocol):
    """A part of a trace, from its start until it is ended."""

    @property
    def context(self) -> TraceContext | None:
        """None where nobody traces."""
        ...

    def set(self, attributes: Attributes) -> None: ...

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        """Now, or `at` seconds since the epoch. Only the first call counts."""
        ...


class Tracer(Protocol):
    """Must not block, nor raise, nor keep more than a bounded number of spans."""

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        began_at: float | None,
        attributes: Attributes,
    ) -> Span: ...

    def close(self) -> None:
        """Send what is left; may take seconds."""
        ...


class _NoSpan:
    context = None

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        pass


NO_SPAN: Span = _NoSpan()
_tracer: Tracer | None = None
_current: ContextVar[TraceContext | None] = ContextVar("nesa_trace", default=None)


def use(tracer: Tracer | None) -> None:
    """Trace with it from now on; the one before is closed."""
    global _tracer
    before, _tracer = _tracer, tracer
    if before is not None:
        before.close()


def current() -> TraceContext | None:
    """The span that what this task does is part of."""
    return _current.get()


def start(
    name: str,
    parent: TraceContext | None = None,
    attributes: Attributes = MappingProxyType({}),
    *,
    began_at: float | None = None,
) -> Span:
    """A span that the caller ends; without a parent it begins a trace."""
    if _tracer is None:
        return NO_SPAN
    return _tracer.start(name, parent, began_at, attributes)


@contextmanager
def within(span: Span) -> Iterator[Span]:
    """End `span` with the context, in which others are part of it, and name an error in it."""
    before = _current.set(span.context)
    try:
        yield span
    except Exception as error:
        span.end(error=type(error).__name__)
        raise
    finally:
        _current.reset(before)
        span.end()
