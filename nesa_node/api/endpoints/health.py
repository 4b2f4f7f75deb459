"""Endpoints `GET /health` and `/version`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nesa_node import __version__
from nesa_node.api.gateway import GatewayOf
from nesa_node.api.openapi import Health, Version, describe
from nesa_node.api.responses.http_responses import json_response

router = APIRouter()


@router.get("/health", **describe("Tell whether requests can be served", None, Health, statuses=()))
async def health(gateway: GatewayOf) -> Response:
    """Return 200 while the process runs: a gateway that waits for nodes needs no restart."""
    models: list[dict[str, Any]] = []
    for card in gateway.models.entries():
        holes = gateway.models.holes(card)
        models.append(
            {
                "id": card.name,
                "open": card.is_open,
                "missing_blocks": None if holes is None else [[h.start, h.end] for h in holes],
            }
        )
    well = bool(models) and all(model["missing_blocks"] == [] for model in models)
    return json_response({"status": "ok" if well else "degraded", "models": models})


@router.get("/version", **describe("Tell the gateway's version", None, Version, statuses=()))
async def version() -> Response:
    return json_response({"version": __version__})
