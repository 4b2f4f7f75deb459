"""Request body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from nesa_node.api.schemas.generation_request import (
    ConversationFields,
    ResponseFormat,
    SamplingRequest,
)
from nesa_node.api.schemas.request_body import (
    AcceptedValues,
    ConditionalText,
    Count,
    Label,
    OnlyNull,
    RequestBody,
    Text,
    TopLogprobs,
    accept_part_types,
    missing_field_error,
)
from nesa_node.web.problem import invalid_request

MAX_MESSAGES = 4096
MAX_MESSAGE_PARTS = 1024
MAX_TOOLS = 128
MAX_PIECES = 16 * 1024
"""Limit on parts and tool calls of all messages; each takes 600 to 1,100 bytes once parsed."""


def _limit_pieces(messages: object) -> object:
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


LimitedPieces = BeforeValidator(_limit_pieces)
"""Validator of a list of messages. Annotated after the length limit, so that it runs first."""

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class MessagePart(RequestBody):
    """Part of a message, with the field that its type ends with."""

    type: str
    text: ConditionalText = None
    refusal: ConditionalText = None
    prompt_cache_breakpoint: OnlyNull = None

    @field_validator("text", "refusal")
    @classmethod
    def _require_own_field(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type", "").endswith(info.field_name):
            raise missing_field_error()
        return value

    def text_content(self) -> str:
        return self.text or self.refusal or ""


class ContentPart(MessagePart):
    type: Literal["text", "refusal"]


Part = Annotated[ContentPart, accept_part_types("text", "refusal")]
Content = Text | Annotated[list[Part], Field(max_length=MAX_MESSAGE_PARTS, fail_fast=True)]


class CalledFunction(RequestBody):
    name: FunctionName
    arguments: Text


class MessageToolCall(RequestBody):
    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(RequestBody):
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
    annotations: Annotated[Any, AcceptedValues([])] = None
    audio: OnlyNull = None
    function_call: OnlyNull = None

    @field_validator("content", "tool_call_id")
    @classmethod
    def _require_by_role(cls, value: object, info: ValidationInfo) -> object:
        role = info.data.get("role", "assistant")
        may_lack = role == "assistant" if info.field_name == "content" else role != "tool"
        if value is None and not may_lack:
            raise missing_field_error()
        return value

    def text_content(self) -> str:
        """Text of the message, its parts joined by newlines."""
        if isinstance(self.content, list):
            return "\n".join(part.text_content() for part in self.content)
        return self.content or ""


class FunctionDefinition(RequestBody):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: FunctionDefinition


class ToolChoiceFunction(RequestBody):
    name: FunctionName


class ToolChoice(RequestBody):
    type: Literal["function"]
    function: ToolChoiceFunction


class ChatCompletionRequest(SamplingRequest, ConversationFields):
    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        LimitedPieces,
    ]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None

    reasoning_effort: Annotated[Any, AcceptedValues("none")] = None
    verbosity: Annotated[Any, AcceptedValues("medium")] = None
    modalities: Annotated[Any, AcceptedValues(["text"])] = None
    audio: OnlyNull = None
    prediction: OnlyNull = None
    web_search_options: OnlyNull = None
    functions: Annotated[Any, AcceptedValues([])] = None
    function_call: Annotated[Any, AcceptedValues("none", "auto")] = None

    def requested_max_tokens(self) -> int | None:
        """Value of the field with two names. Raises `HttpProblem` if they differ."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise invalid_request(
                "max_tokens and max_completion_tokens differ: give one of them",
                param="max_completion_tokens",
            )
        return limits.pop() if limits else None

    def requested_logprobs(self) -> int | None:
        """Value for `Job.top_logprobs`; `HttpProblem` for `top_logprobs` without `logprobs`."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid_request("top_logprobs needs logprobs", param="top_logprobs")
        return None
