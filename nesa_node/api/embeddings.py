"""Endpoint `POST /v1/embeddings`: mean-pooled last hidden states, normalized to length 1."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from nesa_node.api.answering.answer_room import take_room
from nesa_node.api.bodies.completion_body import Tokens, as_list
from nesa_node.api.bodies.fields import Body, Label, ModelName, Nothing, Text
from nesa_node.api.bodies.reading import body_of
from nesa_node.api.gateway import Gateway, GatewayOf, Meter, SpendOf
from nesa_node.api.openapi import EmbeddingList, describe
from nesa_node.api.serving.prompts import all_tokens_of
from nesa_node.api.serving.unless import unless
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Limit on the tokens of all inputs of a request; the same as OpenAI's."""
MOST_NUMBERS = 1 << 23
"""Limit on the float32 numbers of a response: 32 MiB, kept until the client has read them."""
_TENSOR_BYTES = 1024
"""Memory of an embedding's tensor object, beside its numbers."""

router = APIRouter()


SomeText = Annotated[Text, Field(min_length=1)]


class EmbeddingBody(Body):
    model: ModelName = None
    input: (
        SomeText
        | Annotated[list[SomeText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Nothing = None
    user: Label | None = None


@router.post("/v1/embeddings", **describe("Embed texts", EmbeddingBody, EmbeddingList))
async def embed(
    gateway: GatewayOf, spend: SpendOf, body: Annotated[EmbeddingBody, body_of(EmbeddingBody)]
) -> Response:
    model = await gateway.model(body.model)
    inputs = await all_tokens_of(model, as_list(body.input), "input")
    total = sum(map(len, inputs))
    longest = max(map(len, inputs))
    if longest > model.context_length or total > MAX_TOKENS:
        raise Problem(
            400,
            f"This model's maximum context length is {model.context_length} tokens, and at most "
            f"{MAX_TOKENS} go into one request; the longest input has {longest}, all have {total}.",
            code="context_length_exceeded",
            param="input",
        )
    if len(inputs) * model.hidden_size > MOST_NUMBERS:
        raise Problem(
            400,
            f"input: this model's embeddings have {model.hidden_size} numbers, so at most "
            f"{MOST_NUMBERS // model.hidden_size} inputs go into one request; it has {len(inputs)}",
            code="invalid_value",
            param="input",
        )
    take_room(len(inputs) * (4 * model.hidden_size + _TENSOR_BYTES))
    return gateway.computed(partial(_embed, gateway, spend, model, body, inputs))


async def _embed(
    gateway: Gateway,
    spend: Meter,
    model: ServedModel,
    body: EmbeddingBody,
    inputs: Sequence[Sequence[int]],
) -> dict[str, Any]:
    tokens = sum(map(len, inputs))
    spend.usage(model.name, tokens)
    try:
        async with unless(gateway.watch(model)):
            vectors = await model.embed(inputs)
    except asyncio.CancelledError:
        # A request that its client cancels counts against the key's limits, too.
        spend(tokens)
        raise
    spend(tokens)
    return {
        "object": "list",
        "model": body.model or model.name,
        "data": _entries(vectors, packed=body.encoding_format == "base64"),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _entries(vectors: Sequence[torch.Tensor], *, packed: bool) -> Iterator[msgspec.Raw]:
    encode = msgspec.json.Encoder().encode
    for index, vector_D in enumerate(vectors):
        told = _base64(vector_D) if packed else vector_D.tolist()
        yield msgspec.Raw(encode({"object": "embedding", "index": index, "embedding": told}))


def _base64(vector_D: torch.Tensor) -> str:
    """Base64 of `vector_D` as little-endian float32."""
    return base64.b64encode(vector_D.numpy().astype("<f4").tobytes()).decode()
