"""Endpoint `POST /v1/embeddings`: mean-pooled last hidden states, normalized to length 1."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from nesa_node.api.gateway import Gateway, GatewayOf, UsageCounter, UsageOf
from nesa_node.api.models.jobs import cancel_when, tokenize_prompts
from nesa_node.api.models.networks import Pipeline
from nesa_node.api.openapi import EmbeddingList, describe
from nesa_node.api.responses.http_responses import ComputedResponse
from nesa_node.api.responses.in_flight import reserve_memory
from nesa_node.api.schemas.generation_request import Tokens, as_list
from nesa_node.api.schemas.request_body import (
    Label,
    ModelName,
    OnlyNull,
    RequestBody,
    Text,
    body_dependency,
)
from nesa_node.web.problem import invalid_request

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel

MAX_INPUTS = 2048
MAX_NETWORK_INPUTS = 128
MAX_INPUT_TOKENS = 300_000
"""Limit on the tokens of all inputs of a request; the same as OpenAI's."""
MAX_OUTPUT_NUMBERS = 1 << 23
"""Limit on the float32 numbers of a response: 32 MiB, kept until the client has read them."""
_TENSOR_OVERHEAD_BYTES = 1024
"""Memory of an embedding's tensor object, beside its numbers."""

router = APIRouter()


NonEmptyText = Annotated[Text, Field(min_length=1)]


class EmbeddingRequest(RequestBody):
    model: ModelName = None
    input: (
        NonEmptyText
        | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: OnlyNull = None
    user: Label | None = None


@router.post("/v1/embeddings", **describe("Embed texts", EmbeddingRequest, EmbeddingList))
async def embed(
    gateway: GatewayOf,
    usage: UsageOf,
    body: Annotated[EmbeddingRequest, body_dependency(EmbeddingRequest)],
) -> Response:
    if (network := gateway.networks.find(body.model)) is not None:
        texts = _require_texts(body)
        compute = partial(_compute_by_network, gateway, usage, network, body, texts)
        return ComputedResponse(compute, gateway.shutdown)
    model = await gateway.get_model(body.model)
    if gateway.models.adapter_of(body.model) is not None:
        raise invalid_request(
            "embeddings are of the base model: leave the adapter away", param="model"
        )
    inputs = await tokenize_prompts(model, as_list(body.input), "input")
    total = sum(map(len, inputs))
    longest = max(map(len, inputs))
    if longest > model.context_length or total > MAX_INPUT_TOKENS:
        raise invalid_request(
            f"This model's maximum context length is {model.context_length} tokens, and at most "
            f"{MAX_INPUT_TOKENS} go into one request; the longest input has {longest}, all have "
            f"{total}.",
            param="input",
            code="context_length_exceeded",
        )
    if len(inputs) * model.hidden_size > MAX_OUTPUT_NUMBERS:
        raise invalid_request(
            f"input: this model's embeddings have {model.hidden_size} numbers, so at most "
            f"{MAX_OUTPUT_NUMBERS // model.hidden_size} inputs go into one request; it has "
            f"{len(inputs)}",
            param="input",
        )
    reserve_memory(len(inputs) * (4 * model.hidden_size + _TENSOR_OVERHEAD_BYTES))
    compute = partial(_compute, gateway, usage, model, body, inputs)
    return ComputedResponse(compute, gateway.shutdown)


def _require_texts(body: EmbeddingRequest) -> list[str]:
    texts = [each for each in as_list(body.input) if isinstance(each, str)]
    if isinstance(body.input, list) and len(texts) != len(body.input):
        raise invalid_request("input: networks in pieces embed texts, not tokens", param="input")
    if len(texts) > MAX_NETWORK_INPUTS:
        raise invalid_request(
            f"input: at most {MAX_NETWORK_INPUTS} texts for a network in pieces, and not "
            f"{len(texts)}",
            param="input",
        )
    return texts


async def _compute_by_network(
    gateway: Gateway,
    usage: UsageCounter,
    network: str,
    body: EmbeddingRequest,
    texts: Sequence[str],
) -> dict[str, Any]:
    """Of an encoder, by the mean of its last hidden states."""
    usage.start(network, 0)
    states = await gateway.networks.run(network, "feature-extraction", partial(_encode, texts))
    usage.start(network, sum(map(len, states)))
    usage.charge(usage.prompt_tokens)
    vectors = [torch.nn.functional.normalize(state_TD.mean(0), dim=0) for state_TD in states]
    return _to_answer(network, body, vectors, usage.prompt_tokens)


def _encode(texts: Sequence[str], encoder: Pipeline) -> list[torch.Tensor]:
    return [encoder(text, return_tensors=True)[0].float() for text in texts]


async def _compute(
    gateway: Gateway,
    usage: UsageCounter,
    model: ServedModel,
    body: EmbeddingRequest,
    inputs: Sequence[Sequence[int]],
) -> dict[str, Any]:
    if model.is_private:
        raise invalid_request(
            "this gateway runs with --private, and gives no numbers that it decrypted, from which "
            "its key could be computed: ask another one for embeddings",
            param="model",
        )
    tokens = sum(map(len, inputs))
    usage.start(model.name, tokens)
    watching = gateway.models.watch_blocks(model.model_id)
    async with usage.charge_prompt_on_cancel(), cancel_when(watching):
        vectors = await model.embed(inputs)
    usage.charge(tokens)
    return _to_answer(model.name, body, vectors, tokens)


def _to_answer(
    name: str, body: EmbeddingRequest, vectors: Sequence[torch.Tensor], tokens: int
) -> dict[str, Any]:
    return {
        "object": "list",
        "model": body.model or name,
        "data": _embedding_objects(vectors, as_base64=body.encoding_format == "base64"),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _embedding_objects(
    vectors: Sequence[torch.Tensor], *, as_base64: bool
) -> Iterator[msgspec.Raw]:
    encode = msgspec.json.Encoder().encode
    for index, vector_D in enumerate(vectors):
        embedding = _encode_base64(vector_D) if as_base64 else vector_D.tolist()
        yield msgspec.Raw(encode({"object": "embedding", "index": index, "embedding": embedding}))


def _encode_base64(vector_D: torch.Tensor) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(vector_D.numpy().astype("<f4").tobytes()).decode()
