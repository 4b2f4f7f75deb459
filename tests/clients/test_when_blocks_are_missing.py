"""What clients are told while a node is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.live_gateway import MODEL, SPANS, LiveGateway, live_gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def gateway(demo_folder: Path, tmp_path: Path) -> Iterator[LiveGateway]:
    """One of its own, since its swarm is not whole afterwards."""
    with live_gateway(demo_folder, tmp_path) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: LiveGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=gateway.url, api_key=gateway.key, max_retries=0, timeout=120) as client:
        yield client


def _chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4, **options
    )


def test_missing_blocks_are_named_until_somebody_holds_them_again(
    gateway: LiveGateway, client: OpenAI
) -> None:
    assert _chat(client).choices
    gateway.nodes[1].process.kill()
    error = _refusal(client)
    assert error.status_code == 503
    assert error.code == "missing_blocks"
    assert "10:20" in error.message
    assert int(error.response.headers["retry-after"]) > 0
    with pytest.raises(openai.InternalServerError):
        _chat(client, stream=True)
    with gateway.substitute(SPANS[1]):
        assert _answer(client).choices


def _refusal(client: OpenAI) -> openai.InternalServerError:
    """The error once the loss has been noticed; before that a session may wait for a while."""
    deadline = time.monotonic() + 120
    while True:
        try:
            _chat(client)
        except openai.InternalServerError as error:
            if error.code == "missing_blocks" or time.monotonic() > deadline:
                return error
        assert time.monotonic() < deadline
        time.sleep(1)


def _answer(client: OpenAI) -> Any:
    deadline = time.monotonic() + 60
    while True:
        try:
            return _chat(client)
        except openai.InternalServerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
