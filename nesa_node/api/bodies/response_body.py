"""Request body of `POST /v1/responses`, for text only."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from nesa_node.api.bodies.chat_body import MAX_MESSAGES, MAX_PARTS, ChatMessage, FewPieces
from nesa_node.api.bodies.fields import (
    Body,
    Count,
    Label,
    ModelName,
    Nothing,
    Only,
    Share,
    Temperature,
    Text,
    TextIfNeeded,
    TopLogprobs,
    required,
)
from nesa_node.api.bodies.formats import ANY_OBJECT, JsonObject, PlainText
from nesa_node.api.bodies.sampling_body import IfStreamed, Metadata
from nesa_node.api.decoding.job import Sampling
from nesa_node.web.problem import Problem

LOGPROBS = "message.output_text.logprobs"


def _read_part(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("input_text", "output_text", "refusal"):
        raise PydanticCustomError(
            "unsupported_content", "parts of this type are not supported: the model reads text only"
        )
    return value


def _read_item(value: object) -> object:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "message":
        raise PydanticCustomError(
            "unsupported_content", "items of this type are not supported: only messages are"
        )
    return value


class ItemPart(Body):
    type: Literal["input_text", "output_text", "refusal"]
    text: TextIfNeeded = None
    refusal: TextIfNeeded = None
    prompt_cache_breakpoint: Nothing = None
    annotations: Annotated[Any, Only([])] = None
    logprobs: list[Any] | None = None

    @field_validator("text", "refusal")
    @classmethod
    def _is_there(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type", "").endswith(info.field_name):
            raise required()
        return value


class Item(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Text
        | Annotated[
            list[Annotated[ItemPart, BeforeValidator(_read_part)]],
            Field(max_length=MAX_PARTS, fail_fast=True),
        ]
    )
    id: Label | None = None
    status: Label | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def message(self) -> ChatMessage:
        if isinstance(self.content, str):
            return ChatMessage(role=self.role, content=self.content)
        words = "\n".join(part.text or part.refusal or "" for part in self.content)
        return ChatMessage(role=self.role, content=words)


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[PlainText | JsonObject | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    verbosity: Annotated[Any, Only("medium")] = None

    def wanted(self) -> dict[str, Any] | None:
        """JSON schema that the answer must follow; None: any text."""
        match self.format:
            case JsonObject():
                return ANY_OBJECT
            case SchemaFormat():
                return self.format.schema_
        return None


class Reasoning(Body):
    effort: Annotated[Any, Only("none")] = None
    context: Annotated[Any, Only("auto")] = None
    mode: Annotated[Any, Only("standard")] = None
    summary: Nothing = None
    generate_summary: Nothing = None


class ResponseBody(Body):
    model: ModelName = None
    input: (
        Text
        | Annotated[
            list[Annotated[Item, BeforeValidator(_read_item)]],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            FewPieces,
        ]
    )
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: TopLogprobs | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=8)] | None
    ) = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: IfStreamed = None

    user: Label | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    reasoning: Reasoning | None = None
    prompt_cache_options: Nothing = None
    prompt_cache_retention: Annotated[Any, Only("in_memory", "in-memory", "24h")] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    truncation: Annotated[Any, Only("disabled")] = None
    background: Annotated[Any, Only(False)] = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    previous_response_id: Nothing = None
    conversation: Nothing = None
    prompt: Nothing = None
    max_tool_calls: Nothing = None
    access_programs: Nothing = None
    background_options: Nothing = None
    context_management: Nothing = None
    image: Nothing = None
    moderation: Nothing = None

    def messages(self) -> list[ChatMessage]:
        """The conversation as messages of a chat."""
        opening = []
        if self.instructions is not None:
            opening = [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*opening, ChatMessage(role="user", content=self.input)]
        return [*opening, *(item.message() for item in self.input)]

    def sampling(self, defaults: Sampling) -> Sampling:
        """Sampling parameters of the request, with `defaults` for absent fields."""
        return replace(
            defaults,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
        )

    def top(self) -> int | None:
        """Value for `Job.top_logprobs`. Raises `Problem` for `top_logprobs` without `include`."""
        if self.include:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise Problem(
                400,
                f"top_logprobs needs include: [{LOGPROBS!r}]",
                code="invalid_value",
                param="top_logprobs",
            )
        return None
