"""The web application: GET /topology.json and /healthz."""

from __future__ import annotations

from fastapi import FastAPI, Response

from nesa_node.dashboard.page import TopologyPage


def make_app(page: TopologyPage) -> FastAPI:
    """Never answers in HTML."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/topology.json")
    async def topology() -> Response:
        return Response(await page.json(), media_type="application/json")

    return app
