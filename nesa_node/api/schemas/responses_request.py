"""Request body of `POST /v1/responses`, for text only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.schemas.chat_request import (
    MAX_MESSAGE_PARTS,
    MAX_MESSAGES,
    ChatMessage,
    LimitedPieces,
    MessagePart,
)
from nesa_node.api.schemas.generation_request import (
    ANY_OBJECT,
    ConversationFields,
    JsonObject,
    OnlyWithStream,
    PlainText,
    override_sampling,
)
from nesa_node.api.schemas.request_body import (
    AcceptedValues,
    Count,
    Label,
    ModelName,
    OnlyNull,
    Probability,
    RequestBody,
    Temperature,
    Text,
    TopLogprobs,
    accept_part_types,
)
from nesa_node.web.problem import invalid_request

LOGPROBS_INCLUDE = "message.output_text.logprobs"


def _check_item_type(value: object) -> object:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "message":
        raise PydanticCustomError(
            "unsupported_content", "items of this type are not supported: only messages are"
        )
    return value


class InputPart(MessagePart):
    type: Literal["input_text", "output_text", "refusal"]
    annotations: Annotated[Any, AcceptedValues([])] = None
    logprobs: list[Any] | None = None


class InputMessage(RequestBody):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Text
        | Annotated[
            list[Annotated[InputPart, accept_part_types("input_text", "output_text", "refusal")]],
            Field(max_length=MAX_MESSAGE_PARTS, fail_fast=True),
        ]
    )
    id: Label | None = None
    status: Label | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def to_chat_message(self) -> ChatMessage:
        if isinstance(self.content, str):
            return ChatMessage(role=self.role, content=self.content)
        words = "\n".join(part.text_content() for part in self.content)
        return ChatMessage(role=self.role, content=words)


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextOptions(RequestBody):
    format: (
        Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Annotated[Any, AcceptedValues("medium")] = None

    def requested_schema(self) -> dict[str, Any] | None:
        """JSON schema that the answer must follow; None: any text."""
        match self.format:
            case JsonObject():
                return ANY_OBJECT
            case JsonSchemaFormat():
                return self.format.schema_
        return None


class ReasoningOptions(RequestBody):
    effort: Annotated[Any, AcceptedValues("none")] = None
    context: Annotated[Any, AcceptedValues("auto")] = None
    mode: Annotated[Any, AcceptedValues("standard")] = None
    summary: OnlyNull = None
    generate_summary: OnlyNull = None


class ResponsesRequest(ConversationFields):
    model: ModelName = None
    input: (
        Text
        | Annotated[
            list[Annotated[InputMessage, BeforeValidator(_check_item_type)]],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            LimitedPieces,
        ]
    )
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: TopLogprobs | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=8)] | None
    ) = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: OnlyWithStream = None

    user: Label | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Annotated[Any, AcceptedValues("disabled")] = None
    background: Annotated[Any, AcceptedValues(False)] = None
    tools: Annotated[Any, AcceptedValues([])] = None
    tool_choice: Annotated[Any, AcceptedValues("none", "auto")] = None
    previous_response_id: OnlyNull = None
    conversation: OnlyNull = None
    prompt: OnlyNull = None
    max_tool_calls: OnlyNull = None
    access_programs: OnlyNull = None
    background_options: OnlyNull = None
    context_management: OnlyNull = None
    image: OnlyNull = None

    def messages(self) -> list[ChatMessage]:
        """The conversation as messages of a chat."""
        opening = []
        if self.instructions is not None:
            opening = [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*opening, ChatMessage(role="user", content=self.input)]
        return [*opening, *(item.to_chat_message() for item in self.input)]

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Sampling parameters of the request, with `defaults` for absent fields."""
        return override_sampling(defaults, self)

    def requested_logprobs(self) -> int | None:
        """Value for `Job.top_logprobs`; `HttpProblem` for `top_logprobs` without `include`."""
        if self.include:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid_request(
                f"top_logprobs needs include: [{LOGPROBS_INCLUDE!r}]", param="top_logprobs"
            )
        return None
