"""What a body costs before its fields are looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from nesa_node.api.endpoints.embeddings import EmbeddingRequest
from nesa_node.api.endpoints.tokenization import DetokenizeRequest, TokenizeRequest
from nesa_node.api.schemas import request_body as reading
from nesa_node.api.schemas.chat_request import MAX_PIECES, ChatCompletionRequest
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.schemas.request_body import RequestBody
from nesa_node.api.schemas.responses_request import ResponsesRequest
from nesa_node.web.problem import HttpProblem


@pytest.mark.parametrize("empty", ["[]", "{}"])
def test_a_body_of_millions_of_lists_is_refused_before_they_are_made(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "from_json", None)
    body = f'{{"model":"m","messages":[],"metadata":[{f"{empty}," * 300_000}0]}}'
    with pytest.raises(HttpProblem, match="brackets") as refused:
        reading.parse_body(ChatCompletionRequest, body.encode())
    assert refused.value.status == 400


@pytest.mark.parametrize("colon", [":", " :", "\n\t\r :"])
def test_a_body_of_very_many_keys_is_refused_before_it_is_read(
    colon: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "from_json", None)
    body = "{" + ",".join(f'"{at:x}"{colon}1' for at in range(reading.MAX_KEYS + 1)) + "}"
    with pytest.raises(HttpProblem, match="keys") as refused:
        reading.parse_body(ChatCompletionRequest, body.encode())
    assert refused.value.status == 400


def test_a_text_with_very_many_colons_is_read() -> None:
    text = "12:00:01 said: " * (reading.MAX_KEYS // 2)
    data = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert reading.parse_body(ChatCompletionRequest, data).messages[0].content == text


def test_a_long_conversation_is_read() -> None:
    messages = [{"role": "user", "content": "a[0] = {};" * 20}] * 4096
    body = reading.parse_body(
        ChatCompletionRequest, json.dumps({"model": "m", "messages": messages}).encode()
    )
    assert len(body.messages) == 4096


def kinds(base: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


ENDPOINTS = {
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest),
    *(EmbeddingRequest, TokenizeRequest, DetokenizeRequest),
}
FIELDS = [
    (kind, field.alias or name)
    for kind in dict.fromkeys(kinds())
    if kind.__module__.startswith("nesa_node.")
    for name, field in kind.model_fields.items()
]
MANY = 10_000


def test_all_bodies_are_looked_at() -> None:
    assert {kind for kind, _ in FIELDS} >= ENDPOINTS


@pytest.mark.parametrize("many", [{f"a{at}": None for at in range(MANY)}, [None] * MANY], ids=type)
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_with_many_wrong_entries_has_few_errors(
    kind: type[RequestBody], name: str, many: object
) -> None:
    errors = 0
    try:
        kind.model_validate({name: many})
    except ValidationError as error:
        errors = error.error_count()
    # Those of what is missing, and one for each type that the field may have.
    assert errors <= 8


@pytest.mark.parametrize("name", ["logit_bias", "metadata"])
def test_a_mapping_with_too_many_entries_is_told_its_bound(name: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        name: dict.fromkeys(map(str, range(MANY))),
    }
    with pytest.raises(HttpProblem, match=rf"{name}: .*at most \d+ items") as refused:
        reading.parse_body(ChatCompletionRequest, json.dumps(body).encode())
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages: it should have at least 1 item, not 0"),
        ({"messages": [], "stop": [""]}, "messages: it should have at least 1 item, not 0"),
        ({"messages": "Hi"}, "messages: it should be a valid list"),
    ],
)
def test_what_is_wrong_is_said_of_the_field(body: dict[str, Any], words: str) -> None:
    with pytest.raises(HttpProblem) as raised:
        reading.parse_body(ChatCompletionRequest, json.dumps(body).encode())
    assert str(raised.value) == words


def _messages(kind: type[RequestBody], parts: int) -> dict[str, Any]:
    part = {"type": "input_text" if kind is ResponsesRequest else "text", "text": "x"}
    messages = [{"role": "user", "content": [part] * (parts // 64)}] * 64
    return {"input" if kind is ResponsesRequest else "messages": messages}


@pytest.mark.parametrize("kind", [ChatCompletionRequest, ResponsesRequest, TokenizeRequest])
def test_many_parts_are_refused_before_any_is_read(kind: type[RequestBody]) -> None:
    reading.parse_body(kind, json.dumps(_messages(kind, MAX_PIECES)).encode())
    # The first part is wrong, too: that is told only where parts are read.
    body = _messages(kind, MAX_PIECES + 64)
    field = next(iter(body))
    body[field][0] = {"role": "user", "content": [{"type": "none"}, *body[field][0]["content"]]}
    with pytest.raises(
        HttpProblem, match=rf"{field}: .* 16449 parts .* 16384 are allowed"
    ) as refused:
        reading.parse_body(kind, json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, field)


def test_calls_of_tools_count_as_parts() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [{"role": "assistant", "tool_calls": [call] * 128}] * 129
    with pytest.raises(HttpProblem, match="16512 parts and tool calls"):
        reading.parse_body(ChatCompletionRequest, json.dumps({"messages": messages}).encode())
