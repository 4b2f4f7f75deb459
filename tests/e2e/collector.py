"""A collector of traces: an HTTP server that understands OpenTelemetry's protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Received:
    """A span as it was sent, with the service that sent it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]


@dataclass
class Collector:
    endpoint: str
    spans: list[Received] = field(default_factory=list)

    def wait_for(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        """Those that came, once they are enough: they come in batches."""
        deadline = time.monotonic() + PATIENCE_S
        while not enough(list(self.spans)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return list(self.spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listens on loopback until the context ends."""
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.spans += _read(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _read(body: bytes) -> Iterator[Received]:
    request: Any = trace_service_pb2.ExportTraceServiceRequest()
    request.ParseFromString(body)
    for of_process in request.resource_spans:
        about = _attributes(of_process.resource.attributes)
        for of_library in of_process.scope_spans:
            for span in of_library.spans:
                yield Received(
                    about["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    _attributes(span.attributes),
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
