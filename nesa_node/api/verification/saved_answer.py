"""Answers of gateways in files: JSON or an event stream, with the requests that they answer.

The text is a stranger's: sizes are bounded, and all fields are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from nesa_node.api.schemas.chat_request import ChatCompletionRequest
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.schemas.request_body import parse_body
from nesa_node.api.schemas.responses_request import ResponsesRequest
from nesa_node.core.errors import ConfigError
from nesa_node.web.problem import HttpProblem

MAX_FILE_BYTES = 64 << 20
MAX_CHOICES = 128

AnswerRequest = CompletionRequest | ChatCompletionRequest | ResponsesRequest

_REQUEST_KINDS: dict[str, type[AnswerRequest]] = {
    "text_completion": CompletionRequest,
    "chat.completion": ChatCompletionRequest,
    "chat.completion.chunk": ChatCompletionRequest,
    "response": ResponsesRequest,
}
_LAST_EVENTS = ("response.completed", "response.incomplete")
_ESCAPED_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


class UncheckableAnswerError(ConfigError):
    """An answer that cannot be checked: a file that is none, or one that lacks what is needed."""


@dataclass(frozen=True, slots=True)
class SavedToken:
    """A token by its bytes, and the log probability that the answer gives it."""

    data: bytes
    logprob: float | None


@dataclass(slots=True)
class SavedChoice:
    """One choice. `tokens` or `token_ids` are None where the answer does not list them."""

    text: str = ""
    tokens: list[SavedToken] | None = None
    token_ids: list[int] | None = None
    tool_calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Name and arguments."""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class SavedAnswer:
    """A request, and what was answered."""

    request: AnswerRequest
    choices: Mapping[int, SavedChoice]
    model: str | None
    fingerprint: str | None
    completion_tokens: int | None
    """Tokens of all choices, as the answer counts them."""


class _SavedPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class _Token(_SavedPart):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _Logprobs(_SavedPart):
    """Of chats and of completions."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class _Function(_SavedPart):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(_SavedPart):
    index: int | None = Field(default=None, ge=0, lt=MAX_CHOICES)
    function: _Function = _Function()


class _Message(_SavedPart):
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(_SavedPart):
    index: int = Field(default=0, ge=0, lt=MAX_CHOICES)
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(_SavedPart):
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Content(_SavedPart):
    type: str = ""
    text: str | None = None
    logprobs: list[_Token] | None = None


class _Item(_SavedPart):
    type: str = ""
    content: list[_Content] = []


class _Answer(_SavedPart):
    """A whole answer, or one chunk of it."""

    object: str
    model: str | None = None
    system_fingerprint: str | None = None
    choices: list[_Choice] = []
    output: list[_Item] = []
    status: str | None = None
    usage: _Usage | None = None


def read_answer(path: Path, request_path: Path | None = None) -> SavedAnswer:
    """Read an answer: `{"request": ..., "response": ...}`, or the response alone, as JSON or as an
    event stream, with its request in `request_path`.

    Raises `UncheckableAnswerError`.
    """
    events = list(_read_events(path))
    request: object = None
    if len(events) == 1 and "response" in events[0] and "object" not in events[0]:
        request, response = events[0].get("request"), events[0]["response"]
        if isinstance(response, str):  # an event stream
            events = list(_parse_events(response.encode(), path))
        elif isinstance(response, dict):
            events = [response]
        else:
            raise UncheckableAnswerError(f"{path}: its response is no JSON object")
    if not events:
        raise UncheckableAnswerError(f"{path} has no answer")
    if request_path is not None:
        request = _parse_json(_read(request_path), request_path)
    if not isinstance(request, dict):
        raise UncheckableAnswerError(
            f"{path} has no request: give --request, or a file with both, "
            '{"request": {...}, "response": {...}}'
        )
    return _join([_parse_part(event, path) for event in events], request, path)


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    data = _read(path)
    if data.lstrip()[:1] == b"{":
        value = _parse_json(data, path)
        if isinstance(value, dict):
            yield value
        return
    yield from _parse_events(data, path)


def _parse_events(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Answers in a text/event-stream: chunks, or the whole of the last event."""
    for line in data.splitlines():
        if not line.startswith(b"data:"):
            continue
        text = line.removeprefix(b"data:").strip()
        if text == b"[DONE]":
            return
        value = _parse_json(text, path)
        if not isinstance(value, dict) or ("error" in value and "object" not in value):
            raise UncheckableAnswerError(f"{path}: the stream ended with an error: {text[:300]!r}")
        if value.get("type") in _LAST_EVENTS and isinstance(value.get("response"), dict):
            yield value["response"]
        elif "type" not in value:
            yield value


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UncheckableAnswerError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > MAX_FILE_BYTES:
        raise UncheckableAnswerError(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
    return data


def _parse_json(data: bytes, path: Path) -> object:
    try:
        value: object = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise UncheckableAnswerError(f"{path} is no JSON: {error}") from None
    return value


def _parse_part(value: dict[str, Any], path: Path) -> _Answer:
    try:
        return _Answer.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UncheckableAnswerError(
            f"{path} is no answer of a gateway: {where}: {first['msg']}"
        ) from None


def _join(parts: list[_Answer], request: dict[str, Any], path: Path) -> SavedAnswer:
    kind = parts[0].object
    if kind not in _REQUEST_KINDS or any(part.object != kind for part in parts):
        raise UncheckableAnswerError(
            f"{path} is no answer of /v1/completions, /v1/chat/completions or /v1/responses, but "
            f"{kind[:100]!r}"
        )
    try:
        body = parse_body(_REQUEST_KINDS[kind], to_json(request))
    except HttpProblem as problem:
        raise UncheckableAnswerError(
            f"a gateway would refuse the request: {problem.message}"
        ) from None
    choices: dict[int, SavedChoice] = {}
    tokens: int | None = None
    for part in parts:
        for choice in part.choices:
            _add_choice(choices.setdefault(choice.index, SavedChoice()), choice)
        if part.object == "response":
            choices[0] = _response_choice(part)
        if part.usage is not None:
            tokens = part.usage.completion_tokens or part.usage.output_tokens
    if not choices:
        raise UncheckableAnswerError(f"{path}: the answer has no choices")
    first = parts[0]
    return SavedAnswer(body, choices, first.model, first.system_fingerprint, tokens)


def _add_choice(saved: SavedChoice, choice: _Choice) -> None:
    message = choice.message or choice.delta or _Message()
    saved.text += choice.text or message.content or ""
    saved.finish_reason = choice.finish_reason or saved.finish_reason
    for number, call in enumerate(message.tool_calls or ()):
        at = number if call.index is None else call.index
        name, arguments = saved.tool_calls.get(at, ("", ""))
        saved.tool_calls[at] = (
            name + (call.function.name or ""),
            arguments + (call.function.arguments or ""),
        )
    if choice.token_ids is not None:
        saved.token_ids = (saved.token_ids or []) + choice.token_ids
    if (logprobs := choice.logprobs) is None:
        return
    tokens: list[SavedToken] = []
    if logprobs.content is not None:
        tokens = [_chat_token(token) for token in logprobs.content]
    elif logprobs.tokens is not None:
        values = logprobs.token_logprobs or [None] * len(logprobs.tokens)
        if len(values) != len(logprobs.tokens):
            raise UncheckableAnswerError("the answer has not one log probability for each token")
        tokens = [
            SavedToken(_completion_bytes(text), value)
            for text, value in zip(logprobs.tokens, values, strict=True)
        ]
    saved.tokens = (saved.tokens or []) + tokens


def _response_choice(answer: _Answer) -> SavedChoice:
    saved = SavedChoice(
        finish_reason={"completed": "stop", "incomplete": "length"}.get(answer.status or "")
    )
    for item in answer.output:
        for part in item.content if item.type == "message" else ():
            if part.type == "output_text":
                saved.text += part.text or ""
                if part.logprobs:
                    listed = [_chat_token(token) for token in part.logprobs]
                    saved.tokens = (saved.tokens or []) + listed
    return saved


def _chat_token(token: _Token) -> SavedToken:
    if token.bytes is None:
        return SavedToken(token.token.encode(), token.logprob)
    if not all(0 <= byte < 256 for byte in token.bytes):
        raise UncheckableAnswerError("the answer's logprobs have bytes that are none")
    return SavedToken(bytes(token.bytes), token.logprob)


def _completion_bytes(text: str) -> bytes:
    """Bytes of a token in a completion's log probabilities, where bytes that are no text are
    escaped."""
    if (escaped := _ESCAPED_BYTES.fullmatch(text)) is not None:
        return bytes.fromhex(escaped[1].replace("\\x", ""))
    return text.encode()
