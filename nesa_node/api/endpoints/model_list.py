"""Endpoints `GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node.api.gateway import GatewayOf
from nesa_node.api.models.registry import ModelEntry
from nesa_node.api.openapi import KEY_STATUSES, ModelCard, ModelList, describe
from nesa_node.api.responses.http_responses import json_response
from nesa_node.api.schemas.sampling import describe_sampling

router = APIRouter()


@router.get("/v1/models", **describe("List the models", None, ModelList, statuses=KEY_STATUSES))
async def list_models(gateway: GatewayOf) -> Response:
    cards = [_to_model_card(card) for card in gateway.models.entries()]
    return json_response({"object": "list", "data": cards})


@router.get(
    "/v1/models/{model_id:path}",
    **describe("Retrieve a model", None, ModelCard, statuses=(404, *KEY_STATUSES)),
)
async def retrieve_model(gateway: GatewayOf, model_id: str) -> Response:
    return json_response(_to_model_card(gateway.models.find_entry(model_id)))


def _to_model_card(card: ModelEntry) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "nesa-node",
        "max_model_len": card.context_length,
        "default_sampling": None
        if card.served is None
        else describe_sampling(card.served.defaults),
    }
