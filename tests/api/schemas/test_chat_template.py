"""What templates are given."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.api.schemas import chat_template as templates
from nesa_node.api.schemas import request_body as reading
from nesa_node.api.schemas.chat_request import ChatCompletionRequest, ChatMessage, Tool
from nesa_node.api.schemas.request_body import MAX_CONTAINERS, MAX_KEYS, parse_body
from nesa_node.web.problem import HttpProblem


def called_with(arguments: str) -> ChatMessage:
    """Read from a body in which everything of the arguments is escaped that can be."""
    hidden = "".join(f"\\u{ord(one):04x}" if one in '[]{}":' else one for one in arguments)
    body = (
        '{"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function",'
        f'"function":{{"name":"f","arguments":"{hidden}"}}}}]}}]}}'
    )
    return parse_body(ChatCompletionRequest, body.encode()).messages[0]


def given(arguments: str) -> object:
    (entry,) = templates._to_template_messages([called_with(arguments)], has_developer_role=True)
    return entry["tool_calls"][0]["function"]["arguments"]


def test_arguments_are_given_as_objects() -> None:
    assert given('{"a":[{"b":"c"}]}') == {"a": [{"b": "c"}]}
    assert given("no JSON") == "no JSON"


@pytest.mark.parametrize(
    "arguments",
    [
        "[" + "[]," * MAX_CONTAINERS + "1]",
        "{" + ",".join(f'"{at:x}":1' for at in range(MAX_KEYS)) + "}",
        json.dumps([1] * 600_000),
    ],
    ids=["lists", "keys", "numbers"],
)
def test_crowded_arguments_stay_text(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = called_with(arguments)
    monkeypatch.setattr(templates, "from_json", None)
    (entry,) = templates._to_template_messages([message], has_developer_role=True)
    assert entry["tool_calls"][0]["function"]["arguments"] == arguments


def test_as_many_arguments_as_there_may_be_are_read() -> None:
    text = "[" + "[]," * (reading.MAX_CONTAINERS - 2) + "1]"
    assert len(text) < templates._MAX_ARGUMENTS_CHARS
    assert isinstance(given(text), list)


async def test_tools_that_are_too_large_to_be_written_at_once_are_refused() -> None:
    """`json.dumps` of all that a body may hold would stop every other thread."""
    tokenizer = SimpleNamespace(
        chat_template="{{ tools }}", apply_chat_template=lambda **asked: str(asked["tools"])
    )
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    for numbers, is_refused in ((1000, False), (600_000, True)):
        tool = Tool.model_validate(
            {"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * numbers}}}
        )
        told: list[Any] = []

        async def encoded(_tokenizer: Any, text: str, told: Any = told, **_: Any) -> list[int]:
            told.append(text)
            return [1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(templates, "encode", encoded)
            prompting = templates.chat_prompt(tokenizer, body.messages, [tool], max_tokens=10)
            if is_refused:
                with pytest.raises(HttpProblem, match="tools: their parameters") as refused:
                    await prompting
                assert refused.value.status == 400
            else:
                assert await prompting == [1]
                assert "enum" in told[0]
