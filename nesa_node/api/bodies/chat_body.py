"""Request body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from nesa_node.api.bodies.fields import (
    Body,
    Count,
    Label,
    Nothing,
    Only,
    Text,
    TextIfNeeded,
    TopLogprobs,
    required,
)
from nesa_node.api.bodies.formats import ResponseFormat
from nesa_node.api.bodies.sampling_body import Metadata, Sampled
from nesa_node.web.problem import Problem

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128
MAX_PIECES = 16 * 1024
"""Limit on parts and tool calls of all messages; each takes 600 to 1,100 bytes once parsed."""


def _few_pieces(messages: object) -> object:
    """Refuse messages with more than `MAX_PIECES` parts and tool calls before they are parsed."""
    pieces = [
        piece
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
        for piece in (message.get("content"), message.get("tool_calls"))
    ]
    count = sum(len(piece) for piece in pieces if isinstance(piece, list))
    if count > MAX_PIECES:
        raise PydanticCustomError(
            "too_long",
            "all messages together have {count} parts and tool calls, {most} are allowed",
            {"count": count, "most": MAX_PIECES},
        )
    return messages


FewPieces = BeforeValidator(_few_pieces)
"""Validator of a list of messages. Annotated after the length limit, so that it runs first."""

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _read_part(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise PydanticCustomError(
            "unsupported_content", "parts of this type are not supported: the model reads text only"
        )
    return value


class ContentPart(Body):
    type: Literal["text", "refusal"]
    text: TextIfNeeded = None
    refusal: TextIfNeeded = None
    prompt_cache_breakpoint: Nothing = None

    @field_validator("text", "refusal")
    @classmethod
    def _is_there(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.field_name == info.data.get("type"):
            raise required()
        return value

    def words(self) -> str:
        return self.text or self.refusal or ""


Part = Annotated[ContentPart, BeforeValidator(_read_part)]
Content = Text | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(Body):
    name: FunctionName
    arguments: Text


class MessageToolCall(Body):
    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """Message of a conversation; has the fields of answers, so that clients can return them."""

    role: Role
    content: Annotated[Content | None, Field(validate_default=True)] = None
    name: Label | None = None
    tool_calls: (
        Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_call_id: Annotated[Label | None, Field(validate_default=True)] = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    annotations: Annotated[Any, Only([])] = None
    audio: Nothing = None
    function_call: Nothing = None

    @field_validator("content", "tool_call_id")
    @classmethod
    def _is_there(cls, value: object, info: ValidationInfo) -> object:
        role = info.data.get("role", "assistant")
        may_lack = role == "assistant" if info.field_name == "content" else role != "tool"
        if value is None and not may_lack:
            raise required()
        return value

    def words(self) -> str:
        """Text of the message, its parts joined by newlines."""
        if isinstance(self.content, list):
            return "\n".join(part.words() for part in self.content)
        return self.content or ""


class Function(Body):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampled):
    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        FewPieces,
    ]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: Nothing = None
    prompt_cache_retention: Annotated[Any, Only("in_memory", "in-memory", "24h")] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Nothing = None
    audio: Nothing = None
    prediction: Nothing = None
    web_search_options: Nothing = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None

    def top(self) -> int | None:
        """Value for `Job.top_logprobs`. Raises `Problem` for `top_logprobs` without `logprobs`."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise Problem(
                400, "top_logprobs needs logprobs", code="invalid_value", param="top_logprobs"
            )
        return None
