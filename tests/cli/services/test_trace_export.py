"""`--otel-endpoint` on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nesa_node.cli.app import run_command
from nesa_node.cli.services.trace_export import SHUTDOWN_TIMEOUT_S
from nesa_node.core import tracing
from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.models import ClientConfig
from nesa_node.core.settings.sources import load_config
from nesa_node.core.tracing import NO_SPAN

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    argv = ["status", "--initial-peers", PEER, "--otel-endpoint", "http://127.0.0.1:4318"]
    assert run_command(argv) == 2
    assert "nesa-node[otel]" in capsys.readouterr().err


def test_a_command_that_fails_traces_no_more() -> None:
    assert run_command(["generate", "--otel-endpoint", "http://127.0.0.1:9"]) == 2
    assert tracing.start_span("anything") is NO_SPAN


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "grpc://host:4317", "http://", "http://host/path", "http://a b"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otel_endpoint"):
        load_config(ClientConfig, {"otel_endpoint": endpoint}, {})


def test_a_collector_that_answers_nothing_delays_the_end_for_seconds_only() -> None:
    """In a process of its own: the exporter's thread goes on for as long as the process does."""
    program = """
import socket, time
from nesa_node.cli.services.trace_export import MAX_QUEUED_SPANS, start_tracing
from nesa_node.core import tracing
with socket.create_server(("127.0.0.1", 0)) as silent:
    start_tracing(f"http://127.0.0.1:{silent.getsockname()[1]}", "nesa-client", None)
    for number in range(3 * MAX_QUEUED_SPANS):
        tracing.start_span(f"span {number}").end()
    began = time.monotonic()
    tracing.set_tracer(None)
    print(time.monotonic() - began)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert float(done.stdout) < SHUTDOWN_TIMEOUT_S + 5
