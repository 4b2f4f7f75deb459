"""Every refusal becomes the exception that the official Python client has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.live_gateway import MODEL, LiveGateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def connect(gateway: LiveGateway, key: str) -> OpenAI:
    return OpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(gateway: LiveGateway) -> Iterator[OpenAI]:
    with connect(gateway, gateway.key) as client:
        yield client


def _chat(client: OpenAI, **options: Any) -> Any:
    merged = {"model": MODEL, "messages": HELLO, "max_tokens": 4} | options
    return client.chat.completions.create(**merged)


Call = Callable[[OpenAI], object]
REFUSED: dict[str, tuple[Call, str, str]] = {
    "tools": (lambda c: _chat(c, tools=[TOOL]), "tools", "template"),
    "an unknown field": (lambda c: _chat(c, extra_body={"surprise": 1}), "surprise", "surprise"),
    "an unsupported field": (
        lambda c: _chat(c, reasoning_effort="high"),
        "reasoning_effort",
        "reasoning_effort",
    ),
    "a picture": (
        lambda c: _chat(
            c,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                }
            ],
        ),
        "messages",
        "text only",
    ),
    "suffix": (
        lambda c: c.completions.create(model=MODEL, prompt="a", suffix="b", max_tokens=1),
        "suffix",
        "suffix",
    ),
    "previous_response_id": (
        lambda c: c.responses.create(model=MODEL, input="a", previous_response_id="resp_1"),
        "previous_response_id",
        "previous_response_id",
    ),
    "a temperature out of range": (
        lambda c: _chat(c, temperature=9),
        "temperature",
        "temperature",
    ),
    "a schema that cannot be": (
        lambda c: _chat(
            c,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "no such type"}},
            },
        ),
        "response_format",
        "response_format",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_a_bad_request_that_names_the_field(
    client: OpenAI, name: str
) -> None:
    call, param, words = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        call(client)
    assert str(caught.value.param or "").startswith(param)
    assert words in caught.value.message
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_the_context_holds_is_told_as_openai_does(client: OpenAI, stream: bool) -> None:
    words = [{"role": "user", "content": "a word " * 9000}]
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, messages=words, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_a_model_that_is_not_there_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        _chat(client, model="gpt-17")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def test_no_key_a_wrong_one_and_a_revoked_one_are_refused(gateway: LiveGateway) -> None:
    for key in ("", "nesa-wrong-wrong-wrong-wrong", gateway.revoked):
        with connect(gateway, key) as stranger, pytest.raises(openai.AuthenticationError) as caught:
            _chat(stranger)
        assert caught.value.status_code == 401
    unnamed = {"Authorization": openai.omit}
    with connect(gateway, "x") as stranger, pytest.raises(openai.AuthenticationError):
        _chat(stranger, extra_headers=unnamed)


def test_a_key_over_its_limit_is_told_when_to_come_back(gateway: LiveGateway) -> None:
    with connect(gateway, gateway.limited) as client:
        _chat(client)
        with pytest.raises(openai.RateLimitError) as caught:
            _chat(client)
    assert caught.value.status_code == 429
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 60
