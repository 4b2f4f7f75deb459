"""Export of spans to an OpenTelemetry collector (OTLP over HTTP), for `--otel-endpoint`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nesa_node import __version__
from nesa_node.core import tracing
from nesa_node.core.errors import ConfigError
from nesa_node.core.tracing import Attributes, TraceContext, TraceSpan

if TYPE_CHECKING:
    from opentelemetry import trace

MAX_QUEUED_SPANS = 2048
"""Most spans queued for the collector; further ones are dropped."""
EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_S = 5
SHUTDOWN_TIMEOUT_S = 3.0
"""Longest export of queued spans at exit; the rest is dropped."""


def start_tracing(endpoint: str, service: str, instance: str | None) -> None:
    """Start tracing. Raises `ConfigError` if the extra `otel` is not installed."""
    tracing.set_tracer(OtelTracer(endpoint, service, instance))


class OtelTracer:
    """A `Tracer` that exports spans in batches from a thread of its own."""

    def __init__(self, endpoint: str, service: str, instance: str | None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        except ImportError:
            raise ConfigError(
                "--otel-endpoint needs OpenTelemetry: pip install 'nesa-node[otel]'"
            ) from None
        attributes = {"service.name": service, "service.version": __version__}
        if instance is not None:
            attributes["service.instance.id"] = instance
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource.create(attributes), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_INTERVAL_MS
            )
        )
        self._tracer = self._provider.get_tracer("nesa_node", __version__)

    def start_span(
        self,
        name: str,
        parent: TraceContext | None,
        began_at: float | None,
        attributes: Attributes,
    ) -> TraceSpan:
        from opentelemetry import context, trace

        around = context.Context()
        if parent is not None:
            said = trace.SpanContext(
                int.from_bytes(parent.trace_id, "big"),
                int.from_bytes(parent.span_id, "big"),
                is_remote=True,
                trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            )
            around = trace.set_span_in_context(trace.NonRecordingSpan(said), around)
        return _OtelSpan(
            self._tracer.start_span(
                name, around, attributes=dict(attributes), start_time=_nanoseconds(began_at)
            )
        )

    def close(self) -> None:
        # `shutdown` waits for the timeout of each batch, which could delay the exit by minutes.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(SHUTDOWN_TIMEOUT_S)


class _OtelSpan:
    """A `Span` of the protocol in `core/tracing.py`, backed by OpenTelemetry's."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._ended = False

    @property
    def context(self) -> TraceContext:
        context = self._span.get_span_context()
        return TraceContext(
            context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
        )

    def set_attributes(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(at))


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
