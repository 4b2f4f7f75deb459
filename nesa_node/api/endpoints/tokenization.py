"""Endpoints `POST /tokenize` and `/detokenize`, with vLLM's request and response formats."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from nesa_node.api.gateway import GatewayOf, UsageOf
from nesa_node.api.generation.tokenization import decode_all, encode, offload_if_large
from nesa_node.api.openapi import DetokenizeResponse, TokenizeResponse, describe
from nesa_node.api.responses.http_responses import json_response
from nesa_node.api.schemas.chat_request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    LimitedPieces,
    Tool,
)
from nesa_node.api.schemas.chat_template import chat_prompt
from nesa_node.api.schemas.generation_request import MAX_PROMPT_TOKENS
from nesa_node.api.schemas.request_body import Name, RequestBody, Text, TokenId, body_dependency
from nesa_node.web.problem import invalid_request

router = APIRouter()


class TokenizeRequest(RequestBody):
    """Text or conversation to tokenize. Without `model`, the first of /v1/models is used."""

    model: Name | None = None
    prompt: Text | None = None
    messages: (
        Annotated[
            list[ChatMessage],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            LimitedPieces,
        ]
        | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="by default for a text, not for a conversation"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


@router.post("/tokenize", **describe("Split a text into tokens", TokenizeRequest, TokenizeResponse))
async def tokenize(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[TokenizeRequest, body_dependency(TokenizeRequest)],
) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise invalid_request("prompt or messages: give one of them", param="prompt")
    model = await gateway.models.get(body.model)
    if body.messages is not None:
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            raise invalid_request(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        tokens = await chat_prompt(
            model.tokenizer,
            body.messages,
            body.tools or (),
            add_generation_prompt=not continued and body.add_generation_prompt is not False,
            continue_final_message=continued,
            add_special_tokens=bool(body.add_special_tokens),
            max_tokens=MAX_PROMPT_TOKENS,
            render=gateway.template_renderer(),
        )
    else:
        tokens = await encode(
            model.tokenizer,
            body.prompt or "",
            add_special_tokens=body.add_special_tokens is not False,
            max_tokens=MAX_PROMPT_TOKENS,
            param="prompt",
        )
    usage.charge(len(tokens))
    strings = None
    if body.return_token_strs:
        strings = await offload_if_large(
            len(tokens), lambda: model.tokenizer.convert_ids_to_tokens(tokens)
        )
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": model.context_length,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


@router.post(
    "/detokenize", **describe("Join tokens to a text", DetokenizeRequest, DetokenizeResponse)
)
async def detokenize(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[DetokenizeRequest, body_dependency(DetokenizeRequest)],
) -> Response:
    model = await gateway.models.get(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise invalid_request(f"tokens: the model has no token {max(body.tokens)}", param="tokens")
    usage.charge(len(body.tokens))
    (text,) = await decode_all(model.tokenizer, [body.tokens], param="tokens")
    return json_response({"prompt": text})
