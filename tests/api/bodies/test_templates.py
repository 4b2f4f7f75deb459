"""What templates are given."""

from __future__ import annotations

import json

import pytest

from nesa_node.api.bodies import reading, templates
from nesa_node.api.bodies.chat_body import ChatBody, ChatMessage
from nesa_node.api.bodies.reading import MAX_CONTAINERS, MAX_KEYS, parse


def called_with(arguments: str) -> ChatMessage:
    """Read from a body in which everything of the arguments is escaped that can be."""
    hidden = "".join(f"\\u{ord(one):04x}" if one in '[]{}":' else one for one in arguments)
    body = (
        '{"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function",'
        f'"function":{{"name":"f","arguments":"{hidden}"}}}}]}}]}}'
    )
    return parse(ChatBody, body.encode()).messages[0]


def given(arguments: str) -> object:
    (entry,) = templates._conversation([called_with(arguments)], developer=True)
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
    (entry,) = templates._conversation([message], developer=True)
    assert entry["tool_calls"][0]["function"]["arguments"] == arguments


def test_as_many_arguments_as_there_may_be_are_read() -> None:
    text = "[" + "[]," * (reading.MAX_CONTAINERS - 2) + "1]"
    assert len(text) < templates._ARGUMENTS_CHARS
    assert isinstance(given(text), list)
