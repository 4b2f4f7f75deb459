"""What answers say of audits: in their header, and in their usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live import live_gateway
from tests.cli.tiny import BLOCKS
from tests.swarms import in_process_swarm, thirds

HEADER = "x-nesa-verification"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0}),
    ("responses", {"input": "hello", "max_output_tokens": 4, "temperature": 0}),
]


@pytest.fixture(scope="module")
def addresses(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("swarm")
    with in_process_swarm(small_model, thirds(BLOCKS), folder) as found:
        yield found


@pytest.fixture
def url(addresses: Any, small_model: Path, tmp_path: Path) -> Iterator[str]:
    """Of a gateway that audits all."""
    with live_gateway(addresses, tmp_path, small_model, audit=1.0) as found:
        yield found


def test_answers_say_of_how_many_nodes_they_are_audited(url: str) -> None:
    for path, body in BODIES:
        answered = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
        assert answered.status_code == 200
        assert answered.headers[HEADER] == "audit=100%; scheme=relative-l2; drawn=3/3"
        assert answered.json()["usage"]["nesa_audits"] == {"hops": 3, "drawn": 3}


def test_streams_say_it_at_their_end(url: str) -> None:
    # When their headers are sent a node that asked for them could still choose to be honest.
    for path, body in BODIES:
        options = {} if path == "responses" else {"stream_options": {"include_usage": True}}
        answered = httpx.post(
            f"{url}/v1/{path}", json={**body, **options, "stream": True}, timeout=60
        )
        assert answered.headers[HEADER] == "audit=100%; scheme=relative-l2"
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answered.text.splitlines()
            if line.startswith("data: {")
        ]
        last = events[-1].get("response", events[-1])
        assert last["usage"]["nesa_audits"] == {"hops": 3, "drawn": 3}


def test_several_prompts_count_the_nodes_of_each_session(url: str) -> None:
    body = {"prompt": ["hello", "again"], "n": 2, "max_tokens": 3}
    answered = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answered.headers[HEADER].endswith("; drawn=6/6")


def test_errors_have_no_such_header(url: str) -> None:
    answered = httpx.post(f"{url}/v1/completions", json={"prompt": []}, timeout=60)
    assert answered.status_code == 400
    assert HEADER not in answered.headers
