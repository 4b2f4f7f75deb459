"""Endpoints `GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node.api.answering.answers import json_response
from nesa_node.api.bodies.defaults import told
from nesa_node.api.gateway import GatewayOf
from nesa_node.api.openapi import OF_KEYS, ModelCard, ModelList, describe
from nesa_node.api.serving.models import Card

router = APIRouter()


@router.get("/v1/models", **describe("List the models", None, ModelList, statuses=OF_KEYS))
async def list_models(gateway: GatewayOf) -> Response:
    cards = [_told(card) for card in gateway.models.cards()]
    return json_response({"object": "list", "data": cards})


@router.get(
    "/v1/models/{model_id:path}",
    **describe("Retrieve a model", None, ModelCard, statuses=(404, *OF_KEYS)),
)
async def tell_model(gateway: GatewayOf, model_id: str) -> Response:
    return json_response(_told(gateway.models.card(model_id)))


def _told(card: Card) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "nesa-node",
        "max_model_len": card.context_length,
        "default_sampling": None if card.served is None else told(card.served.defaults),
    }
