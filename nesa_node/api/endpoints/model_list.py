"""Endpoints `GET /v1/models`, `/v1/models/{id}`, `/health` and `/version`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node import __version__
from nesa_node.api.gateway import GatewayOf
from nesa_node.api.models.registry import ModelEntry
from nesa_node.api.openapi import KEY_STATUSES, Health, ModelCard, ModelList, Version, describe
from nesa_node.api.responses.http_responses import json_response
from nesa_node.api.schemas.sampling import describe_sampling

router = APIRouter()


@router.get("/v1/models", **describe("List the models", None, ModelList, statuses=KEY_STATUSES))
async def list_models(gateway: GatewayOf) -> Response:
    cards = [_to_model_card(entry) for entry in gateway.models.entries()]
    return json_response({"object": "list", "data": cards})


@router.get(
    "/v1/models/{model_id:path}",
    **describe("Retrieve a model", None, ModelCard, statuses=(404, *KEY_STATUSES)),
)
async def retrieve_model(gateway: GatewayOf, model_id: str) -> Response:
    return json_response(_to_model_card(gateway.models.find_entry(model_id)))


def _to_model_card(entry: ModelEntry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "nesa-node",
        "max_model_len": entry.context_length,
        "default_sampling": None
        if entry.served is None
        else describe_sampling(entry.served.defaults),
    }


@router.get("/health", **describe("Tell whether requests can be served", None, Health, statuses=()))
async def health(gateway: GatewayOf) -> Response:
    """Return 200 while the process runs: a gateway that waits for nodes needs no restart."""
    models: list[dict[str, Any]] = []
    for entry in gateway.models.entries():
        holes = gateway.models.holes(entry)
        models.append(
            {
                "id": entry.name,
                "open": entry.is_open,
                "missing_blocks": None if holes is None else [[h.start, h.end] for h in holes],
            }
        )
    well = bool(models) and all(model["missing_blocks"] == [] for model in models)
    return json_response({"status": "ok" if well else "degraded", "models": models})


@router.get("/version", **describe("Tell the gateway's version", None, Version, statuses=()))
async def version() -> Response:
    return json_response({"version": __version__})
