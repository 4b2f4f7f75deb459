"""What others may send as a trace's context, and spans where nobody traces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nesa_node.core import tracing
from nesa_node.core.tracing import NO_SPAN, Attributes, TraceContext, TraceSpan

TRACE, SPAN = bytes(range(1, 17)), bytes(range(1, 9))


def test_a_context_is_what_it_was_made_of() -> None:
    context = TraceContext(TRACE, SPAN)
    assert TraceContext.parse(bytes(context)) == context


@pytest.mark.parametrize(
    "data", [b"", TRACE, TRACE + SPAN + b"x", bytes(16) + SPAN, TRACE + bytes(8), b"x" * 64]
)
def test_anything_else_is_no_context(data: bytes) -> None:
    assert TraceContext.parse(data) is None


def test_a_traceparent_of_a_recorded_trace_is_one() -> None:
    text = f"00-{TRACE.hex()}-{SPAN.hex()}"
    assert TraceContext.parse_header(f"{text}-01") == TraceContext(TRACE, SPAN)
    for wrong in (f"{text}-00", f"{text}-01-more", text, "", f"00-{'0' * 32}-{SPAN.hex()}-01"):
        assert TraceContext.parse_header(wrong) is None


class Noted:
    """A tracer that keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[NotedSpan] = []
        self.closed = False

    def start_span(
        self,
        name: str,
        parent: TraceContext | None,
        began_at: float | None,
        attributes: Attributes,
    ) -> TraceSpan:
        self.spans.append(NotedSpan(name, parent, len(self.spans) + 1))
        return self.spans[-1]

    def close(self) -> None:
        self.closed = True


class NotedSpan:
    def __init__(self, name: str, parent: TraceContext | None, number: int) -> None:
        self.name = name
        self.parent = parent
        self.context = TraceContext(TRACE, number.to_bytes(8, "big"))
        self.ends: list[str | None] = []

    def set_attributes(self, attributes: Attributes) -> None:
        pass

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        self.ends.append(error)


@pytest.fixture
def tracer() -> Iterator[Noted]:
    tracer = Noted()
    tracing.set_tracer(tracer)
    yield tracer
    tracing.set_tracer(None)
    assert tracer.closed


def test_without_a_tracer_nothing_is_made() -> None:
    assert tracing.start_span("anything") is NO_SPAN
    with tracing.use_span(NO_SPAN):
        assert tracing.current_context() is None


def test_what_is_within_a_span_may_be_part_of_it(tracer: Noted) -> None:
    with tracing.use_span(tracing.start_span("outer")) as outer:
        assert tracing.current_context() == outer.context
        tracing.start_span("inner", tracing.current_context())
    assert tracing.current_context() is None
    assert tracer.spans[1].parent == outer.context


def test_an_error_within_a_span_is_named_in_it(tracer: Noted) -> None:
    with pytest.raises(ValueError, match="secret"), tracing.use_span(tracing.start_span("outer")):
        raise ValueError("a secret")
    assert tracer.spans[0].ends[0] == "ValueError"
