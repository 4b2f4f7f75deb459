"""What clients send to the gateway, and what models write that it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from nesa_node.api.endpoints.embeddings import EmbeddingRequest
from nesa_node.api.endpoints.tokenization import DetokenizeRequest, TokenizeRequest
from nesa_node.api.schemas.chat_request import ChatCompletionRequest
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.schemas.request_body import RequestBody
from nesa_node.api.schemas.request_body import parse_body as parse_body
from nesa_node.api.schemas.responses_request import ResponsesRequest
from nesa_node.api.schemas.tool_calls import CallFormat, ToolCallParser
from nesa_node.web.problem import HttpProblem
from tests.fuzz.mutation import JSON
from tests.fuzz.target import Parse, Target

_KINDS: tuple[type[RequestBody], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "there"},
    ],
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "stop": ["end"],
    "logit_bias": {"5": 1.5},
    "max_tokens": 10,
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 3,
}
_COMPLETION = {"model": "m", "prompt": ["one", "two"], "max_tokens": 5, "logprobs": 2, "echo": True}
_RESPONSE = {
    "model": "m",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "instructions": "be brief",
    "max_output_tokens": 10,
}


@contextmanager
def _bodies() -> Iterator[Parse]:
    def parse(data: bytes) -> None:
        parse_body(_KINDS[data[0] % len(_KINDS) if data else 0], data[1:])

    yield parse


def _body_seeds() -> list[bytes]:
    tokenize = {"model": "m", "messages": _CHAT["messages"], "add_generation_prompt": True}
    others = ({"model": "m", "input": [[1, 2], [3]]}, tokenize, {"model": "m", "tokens": [1, 2]})
    bodies = (_CHAT, _COMPLETION, _RESPONSE, *others)
    return [bytes([kind]) + json.dumps(body).encode() for kind, body in enumerate(bodies)]


@contextmanager
def _calls() -> Iterator[Parse]:
    """Fed in pieces, as a model writes."""

    def parse(data: bytes) -> None:
        written: CallFormat = "tagged" if data[:1] < b"\x80" else "bare"
        text = data[1:].decode(errors="replace")
        reader = ToolCallParser(written, ["look"])
        half = len(text) // 2
        for piece in (text[:half], text[half:]):
            reader.feed(piece)
        _, calls = reader.finish()
        for call in calls:
            assert isinstance(call["function"]["name"], str)
            assert isinstance(call["function"]["arguments"], str)

    yield parse


def _call_seeds() -> list[bytes]:
    call = '{"name": "look", "arguments": {"at": [1, 2.5, null, "x"]}}'
    tagged = f"well <tool_call>{call}</tool_call> and <tool_call>{call}"
    return [
        b"\0" + tagged.encode(),
        b"\xff" + call.encode(),
        b"\xff" + f"[{call}, {call}]".encode(),
    ]


TARGETS: dict[str, Target] = {
    "body": Target(open=_bodies, seeds=_body_seeds, tokens=JSON, refusals=(HttpProblem,)),
    "tool_call": Target(
        open=_calls,
        seeds=_call_seeds,
        tokens=(*JSON, b"<tool_call>", b"</tool_call>", b"<tool_", b'"name": []', b'"name": {}'),
        refusals=(),
    ),
}
