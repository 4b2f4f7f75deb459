"""Dashboard application: its page, feed and JSON over HTTP, alone or within a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from nesa_node.client.activity import Activity
from nesa_node.dashboard.assets import load_assets
from nesa_node.dashboard.board import Board
from nesa_node.dashboard.feed import MAX_VIEWERS, EventStream, Feed
from nesa_node.dashboard.observer import LOOK_EVERY_S, Observer
from nesa_node.dashboard.page import TopologyPage
from nesa_node.dashboard.shapes import Shapes
from nesa_node.swarm.node import Swarm

PREFIX = "/dashboard"
_JSON = "application/json"


class Dashboard:
    """Dashboard of one swarm: serve its `routes`, within the context of `watching`.

    `activity` is that of this process's sessions. With `playground` the page has a prompt form,
    which posts to `/v1/chat/completions` of the same origin.
    """

    def __init__(
        self,
        *,
        activity: Activity | None = None,
        playground: bool = False,
        look_every_s: float = LOOK_EVERY_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        self.shapes = Shapes()
        self.board = Board(playground=playground, look_every_s=look_every_s)
        self.feed = Feed(self.board.sections, max_viewers=max_viewers)
        self._activity = activity
        self._look_every_s = look_every_s
        self._assets = load_assets()

    @asynccontextmanager
    async def watching(self, swarm: Swarm) -> AsyncIterator[None]:
        """Poll `swarm` in a background task within the context.

        On exit the viewers' streams end, so exit before stopping the server, which waits for them.
        """
        observer = Observer(
            swarm,
            self.board,
            self.feed,
            self.shapes,
            activity=self._activity,
            every_s=self._look_every_s,
        )
        looking = asyncio.create_task(observer.run(), name="dashboard")
        try:
            yield
        finally:
            self.feed.close()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    def routes(self) -> list[BaseRoute]:
        """Routes `/`, `/dashboard/...` and `/topology.json`, all of them read only."""
        return [
            Route("/", self._index),
            Route(f"{PREFIX}/static/{{path:path}}", self._static),
            Route(f"{PREFIX}/events", EventStream(self.feed), methods=["GET"]),
            Route(f"{PREFIX}/state.json", self._state),
            Route("/topology.json", self._topology),
        ]

    async def _index(self, request: Request) -> Response:
        return self._assets["index.html"].answer(request)

    async def _static(self, request: Request) -> Response:
        asset = self._assets.get(request.path_params["path"])
        return Response(status_code=404) if asset is None else asset.answer(request)

    async def _state(self, request: Request) -> Response:
        return Response(self.board.sections.since(None), media_type=_JSON)

    async def _topology(self, request: Request) -> Response:
        model = request.query_params.get("model")
        body = await self.shapes.json(model)
        if body is None and model in {view.model_id for view in self.board.models}:
            # The page requests the topology of a model before its first one is computed.
            body = await TopologyPage().json()
        return Response(status_code=404) if body is None else Response(body, media_type=_JSON)


def make_app(dashboard: Dashboard) -> ASGIApp:
    """Application with the dashboard and GET /healthz."""
    return Starlette(routes=[*dashboard.routes(), Route("/healthz", _healthz)])


async def _healthz(request: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type=_JSON)
