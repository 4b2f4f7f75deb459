"""OpenAPI description at /openapi.json: schemas of responses and errors.

These classes only describe responses; the endpoints build them as plain dicts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from nesa_node import __version__
from nesa_node.api.generation.job import FinishReason
from nesa_node.api.schemas.request_body import RequestBody

_BODY = "x-body"
_MEDIA_TYPE = "x-media-type"
_BODY_CLASSES: dict[str, type[RequestBody]] = {}
_REF_TEMPLATE = "#/components/schemas/{model}"
_STATUS_DESCRIPTIONS = {
    400: "The request is invalid or cannot be served; `param` names the field.",
    401: "No key was given, or a wrong one.",
    403: "The request comes from a page of another origin.",
    404: "There is no such model.",
    408: "The body was not received in time.",
    413: "The body is too large.",
    415: "The content type is not the one that the endpoint takes.",
    429: "The key is over one of its limits: see Retry-After.",
    502: "Nodes of the swarm refused, or broke the protocol.",
    503: "Blocks are missing, nodes are busy, or the swarm cannot be reached: see Retry-After.",
}
KEY_STATUSES = (401, 403, 429)
"""Statuses of requests that are refused before they reach an endpoint."""
_RETRY_AFTER_HEADER = {
    "retry-after": {"description": "Seconds to wait.", "schema": {"type": "string"}},
}
_REQUEST_ID_HEADER = {
    "x-request-id": {"description": "Its id, or a generated one.", "schema": {"type": "string"}},
}

_VERIFICATION_HEADER = {
    "x-nesa-verification": {
        "description": "How audits are drawn and, unless the answer is a stream, of how many of "
        "its nodes: audit=1%; scheme=relative-l2; drawn=0/3.",
        "schema": {"type": "string"},
    },
}


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


class AnswerAudits(ResponseModel):
    """Nodes that computed the answer, and those that were drawn for audits."""

    hops: int
    drawn: int


class Usage(ResponseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    nesa_audits: AnswerAudits | None = None


class FunctionCall(ResponseModel):
    name: str
    arguments: str


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprobs]


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ResponseObject(ResponseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]


class ResponseEvent(ResponseModel):
    type: str
    sequence_number: int


class Embedding(ResponseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, Field(description="base64 of little-endian float32")]


class EmbeddingList(ResponseModel):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class Image(ResponseModel):
    b64_json: str | None = Field(default=None, description="A PNG file in base64.")
    url: str | None = Field(default=None, description="The same as a data URL, if asked for.")


class ImageList(ResponseModel):
    created: int
    data: list[Image]
    output_format: Literal["png"]


class Transcription(ResponseModel):
    text: str


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    default_sampling: dict[str, float] | None = None
    parent: str | None = Field(default=None, description="Of an adapter: its base model.")


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str


class ModelHealth(ResponseModel):
    id: str
    open: bool
    missing_blocks: list[list[int]] | None


class Health(ResponseModel):
    status: Literal["ok", "degraded"]
    models: list[ModelHealth]


class Version(ResponseModel):
    version: str


def describe(
    summary: str,
    body: type[RequestBody] | None,
    answer: type[ResponseModel],
    events: type[ResponseModel] | None = None,
    *,
    last_event: str = "[DONE]",
    media_type: str = "application/json",
    statuses: tuple[int, ...] = tuple(_STATUS_DESCRIPTIONS),
) -> dict[str, Any]:
    """FastAPI arguments that describe a route; `schemas/request_body.py` reads its body."""
    ok: dict[str, Any] = {
        "model": answer,
        "description": "The answer.",
        "headers": _REQUEST_ID_HEADER | (_VERIFICATION_HEADER if events is not None else {}),
    }
    if events is not None:
        words = f"Server-sent events with a {events.__name__} each; the last one is {last_event}."
        ok["content"] = {"text/event-stream": {"schema": {"description": words}}}
    responses: dict[int, Any] = {200: ok}
    for status in statuses:
        headers = _REQUEST_ID_HEADER | (_RETRY_AFTER_HEADER if status in (429, 503) else {})
        responses[status] = {
            "model": ErrorResponse,
            "description": _STATUS_DESCRIPTIONS[status],
            "headers": headers,
        }
    extra: dict[str, Any] = {}
    if body is not None:
        _BODY_CLASSES[body.__name__] = body
        extra[_BODY] = body.__name__
        extra[_MEDIA_TYPE] = media_type
    return {"summary": summary, "responses": responses, "openapi_extra": extra}


def install_openapi(app: FastAPI) -> None:
    """Have `app` describe the bodies of requests, which FastAPI does not parse."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _make_spec(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _make_spec(app: FastAPI) -> dict[str, Any]:
    spec = get_openapi(
        title="nesa-node",
        version=__version__,
        description="OpenAI's API over a swarm of machines that serve one model together.",
        routes=app.routes,
    )
    operations = [
        operation
        for path in spec["paths"].values()
        for operation in path.values()
        if _BODY in operation
    ]
    kinds = [_BODY_CLASSES[operation[_BODY]] for operation in operations]
    _, definitions = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=_REF_TEMPLATE
    )
    spec["components"]["schemas"].update(definitions["$defs"])
    for operation in operations:
        schema = {"$ref": _REF_TEMPLATE.format(model=operation.pop(_BODY))}
        operation["requestBody"] = {
            "required": True,
            "content": {operation.pop(_MEDIA_TYPE): {"schema": schema}},
        }
    return spec
