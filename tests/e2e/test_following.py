"""One session can be followed through all processes of a chain, and through none of a star."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nesa_node.core.ids import Span
from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.e2e.collector import Collector, Received, collecting
from tests.e2e.gateway import gateway_process
from tests.swarms import Daemons, daemons

NEW = 6
PATIENCE_S = 60.0
Event = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def swarm(
    model: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemons]:
    flags = ("--log-format", "json", "--otel-endpoint", collector.endpoint)
    with daemons(model, tmp_path_factory.mktemp("swarm"), *flags) as running:
        running.start_all([Span(0, 1), Span(1, 3), Span(3, BLOCKS)])
        yield running


def events(log: str, name: str) -> list[Event]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def generate(model: Path, swarm: Daemons, route: str, *flags: str) -> str:
    """What the client writes to its log."""
    argv = [sys.executable, "-m", "nesa_node", "generate", str(model), "hello again", *flags]
    argv += ["--initial-peers", *swarm.addresses, "--route", route, "--max-new-tokens", str(NEW)]
    argv += ["--log-format", "json", "--log-level", "info", "--dtype", "float32"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def sessions(swarm: Daemons, known: int) -> list[str]:
    """Which session each node opened last, once it has logged more than `known` ends."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        closed = [events(swarm.log(node), "session_closed") for node in swarm.nodes]
        if all(len(each) > known for each in closed):
            break
        time.sleep(0.05)
    opened = [events(swarm.log(node), "session_opened")[-1]["session"] for node in swarm.nodes]
    assert opened == [each[-1]["session"] for each in closed]
    return opened


def test_a_chain_has_one_name_and_one_trace(
    model: Path, swarm: Daemons, collector: Collector
) -> None:
    known = len(events(swarm.log(swarm.nodes[0]), "session_closed"))
    collector.spans.clear()
    said = generate(model, swarm, "chain", "--otel-endpoint", collector.endpoint)
    (opened,) = events(said, "chain_opened")
    assert [opened["session"]] * 3 == sessions(swarm, known)
    assert events(said, "session_closed")[-1]["session"] == opened["session"]

    def of(spans: list[Received], service: str, name: str) -> list[Received]:
        return [span for span in spans if (span.service, span.name) == (service, name)]

    spans = collector.wait_for(lambda spans: len(of(spans, "nesa-node", "node")) == 3)
    assert len({span.trace_id for span in spans}) == 1
    (session,) = of(spans, "nesa-client", "session")
    assert session.parent_id == ""
    assert session.attributes["nesa.session"] == opened["session"]
    assert session.attributes["nesa.hops"] == 3
    for name in ("open", "prefill", "decode"):
        (part,) = of(spans, "nesa-client", name)
        assert part.parent_id == session.span_id
        assert 0 < part.seconds <= session.seconds
    (decode,) = of(spans, "nesa-client", "decode")
    assert decode.attributes["nesa.steps"] == decode.attributes["nesa.tokens"] == NEW - 1
    nodes = of(spans, "nesa-node", "node")
    assert {node.attributes["nesa.peer"] for node in nodes} == {n.peer_id for n in swarm.nodes}
    for node in nodes:
        assert node.parent_id == session.span_id
        assert node.attributes["nesa.steps"] == NEW
        parts = [span for span in spans if span.parent_id == node.span_id]
        assert sorted(part.name for part in parts) == ["first step", "open"]
    # However many tokens there are.
    assert len(spans) == 4 + 3 * 3


def test_a_request_to_a_gateway_is_one_trace_to_its_last_node(
    model: Path, swarm: Daemons, collector: Collector, tmp_path: Path
) -> None:
    flags = ("--log-format", "json", "--otel-endpoint", collector.endpoint)
    caller, trace_id = "00f067aa0ba902b7", "4bf92f3577b34da6a3ce929d0e0e4736"
    with gateway_process(model, tmp_path, swarm.addresses, *flags) as gateway:
        known = len(events(swarm.log(swarm.nodes[0]), "session_closed"))
        collector.spans.clear()
        answer = httpx.post(
            f"{gateway.url}/v1/completions",
            json={"model": "tiny", "prompt": "hello again", "max_tokens": NEW, "n": 2},
            headers={"x-request-id": "mine-7", "traceparent": f"00-{trace_id}-{caller}-01"},
            timeout=40,
        )
        assert answer.status_code == 200, answer.text
        names = sessions(swarm, known)

        def nodes(spans: list[Received]) -> list[Received]:
            return [span for span in spans if span.name == "node"]

        spans = collector.wait_for(
            lambda spans: len(nodes(spans)) == 3 and any(s.parent_id == caller for s in spans)
        )
        log = gateway.log
    (request,) = [span for span in spans if span.parent_id == caller]
    assert (request.service, request.name) == ("nesa-gateway", "POST /v1/completions")
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["nesa.request_id"] == "mine-7"
    (session,) = [span for span in spans if span.name == "session"]
    assert session.parent_id == request.span_id
    assert session.attributes["nesa.rows"] == 2
    assert {span.parent_id for span in nodes(spans)} == {session.span_id}
    assert {span.trace_id for span in spans} == {trace_id}
    (opened,) = events(log, "chain_opened")
    assert opened["request_id"] == "mine-7"
    assert [opened["session"]] * 3 == names
    (answered,) = events(log, "request_answered")
    assert (answered["request_id"], answered["status"]) == ("mine-7", 200)
    assert answered["route"] == "/v1/completions"
    # What the gateway calls a request is nobody else's business.
    assert not any("mine-7" in swarm.log(node) for node in swarm.nodes)


def test_nodes_of_a_star_have_nothing_in_common(
    model: Path, swarm: Daemons, collector: Collector
) -> None:
    known = len(events(swarm.log(swarm.nodes[0]), "session_closed"))
    collector.spans.clear()
    said = generate(model, swarm, "star", "--otel-endpoint", collector.endpoint)
    (opened,) = events(said, "chain_opened")
    names = sessions(swarm, known)
    assert len({*names, opened["session"]}) == 4
    logs = [swarm.log(node) for node in swarm.nodes]
    for at, name in enumerate(names):
        assert [name in log for log in logs] == [other == at for other in range(3)]
    spans = collector.wait_for(lambda spans: any(span.name == "session" for span in spans))
    time.sleep(1.5)
    assert {span.service for span in [*spans, *collector.spans]} == {"nesa-client"}


def test_nodes_tell_no_traces_of_clients_that_do_not_trace(
    model: Path, swarm: Daemons, collector: Collector
) -> None:
    known = len(events(swarm.log(swarm.nodes[0]), "session_closed"))
    collector.spans.clear()
    generate(model, swarm, "chain")
    sessions(swarm, known)
    time.sleep(1.5)
    assert collector.spans == []
