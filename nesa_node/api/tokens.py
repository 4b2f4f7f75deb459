"""Endpoints `POST /tokenize` and `/detokenize`, with vLLM's request and response formats."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from nesa_node.api.answering.answers import json_response
from nesa_node.api.bodies.chat_body import MAX_MESSAGES, MAX_TOOLS, ChatMessage, FewPieces, Tool
from nesa_node.api.bodies.completion_body import MAX_TOKENS
from nesa_node.api.bodies.fields import Body, Name, Text, TokenId
from nesa_node.api.bodies.reading import body_of
from nesa_node.api.bodies.splitting import encode, join, light
from nesa_node.api.bodies.templates import chat_prompt
from nesa_node.api.gateway import CallerOf, GatewayOf, SpendOf
from nesa_node.api.openapi import Detokenized, Tokenized, describe
from nesa_node.web.problem import Problem

router = APIRouter()


class TokenizeBody(Body):
    """Text or conversation to tokenize. Without `model`, the first of /v1/models is used."""

    model: Name | None = None
    prompt: Text | None = None
    messages: (
        Annotated[
            list[ChatMessage],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            FewPieces,
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


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


@router.post("/tokenize", **describe("Split a text into tokens", TokenizeBody, Tokenized))
async def tokenize(
    gateway: GatewayOf,
    caller: CallerOf,
    spend: SpendOf,
    body: Annotated[TokenizeBody, body_of(TokenizeBody)],
) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise Problem(
            400, "prompt or messages: give one of them", code="invalid_value", param="prompt"
        )
    model = await gateway.models.get(body.model)
    if body.messages is not None:
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            raise Problem(
                400,
                "add_generation_prompt and continue_final_message exclude each other",
                code="invalid_value",
                param="continue_final_message",
            )
        tokens = await chat_prompt(
            model.tokenizer,
            body.messages,
            body.tools or (),
            generation=not continued and body.add_generation_prompt is not False,
            continued=continued,
            special=bool(body.add_special_tokens),
            most=MAX_TOKENS,
            render=gateway.render(caller),
        )
    else:
        special = body.add_special_tokens is not False
        tokens = await encode(
            model.tokenizer, body.prompt or "", special=special, most=MAX_TOKENS, param="prompt"
        )
    spend(len(tokens))
    strings = None
    if body.return_token_strs:
        strings = await light(len(tokens), lambda: model.tokenizer.convert_ids_to_tokens(tokens))
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": model.context_length,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


@router.post("/detokenize", **describe("Join tokens to a text", DetokenizeBody, Detokenized))
async def detokenize(
    gateway: GatewayOf,
    spend: SpendOf,
    body: Annotated[DetokenizeBody, body_of(DetokenizeBody)],
) -> Response:
    model = await gateway.models.get(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise Problem(
            400,
            f"tokens: the model has no token {max(body.tokens)}",
            code="invalid_value",
            param="tokens",
        )
    spend(len(body.tokens))
    (text,) = await join(model.tokenizer, [body.tokens], param="tokens")
    return json_response({"prompt": text})
