"""Dashboard application: its page, feed and JSON over HTTP, alone or within a gateway."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from nesa_node.client.model.activity import Activity
from nesa_node.dashboard.feed import MAX_VIEWERS, StateFeed, StateStream
from nesa_node.dashboard.observer import (
    POLL_INTERVAL_S,
    STARTING_JSON,
    ModelTopologies,
    SwarmObserver,
)
from nesa_node.dashboard.state import DashboardState
from nesa_node.dashboard.training_curves import TrainingCurves
from nesa_node.swarm.node import Swarm

STATIC_FOLDER = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'self'",
    )
)
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    gzip_body: bytes
    media_type: str
    etag: str

    def respond(self, request: Request) -> Response:
        """Response with the file, compressed if the browser accepts gzip; 304 if unchanged."""
        headers = {
            "etag": self.etag,
            # Revalidate each time, so that page and server have the same version.
            "cache-control": "no-cache",
            "vary": "accept-encoding",
            "content-security-policy": CONTENT_SECURITY_POLICY,
        }
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        body = self.body
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            body = self.gzip_body
        return Response(body, headers=headers, media_type=self.media_type)


def load_static_files() -> dict[str, StaticFile]:
    """Load all static files, by their path below `STATIC_FOLDER`, with slashes."""
    assets = {}
    for path in sorted(STATIC_FOLDER.rglob("*")):
        if path.is_file() and path.suffix in _MEDIA_TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            packed = gzip.compress(body, 6, mtime=0)
            asset = StaticFile(body, packed, _MEDIA_TYPES[path.suffix], tag)
            assets[path.relative_to(STATIC_FOLDER).as_posix()] = asset
    return assets


PATH_PREFIX = "/dashboard"
_JSON_TYPE = "application/json"


class Dashboard:
    """Dashboard of one swarm: serve its `routes`, within the context of `watch_swarm`.

    `activity` is that of this process's sessions, `curves` are of trainings on this machine,
    `audits_path` is where this user's clients keep what audits said. With `playground` the page has
    a prompt form, which posts to `/v1/chat/completions` of the same origin.
    """

    def __init__(
        self,
        *,
        activity: Activity | None = None,
        curves: TrainingCurves | None = None,
        audits_path: Path | None = None,
        playground: bool = False,
        poll_interval_s: float = POLL_INTERVAL_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        self.topologies = ModelTopologies()
        self.state = DashboardState(playground=playground, poll_interval_s=poll_interval_s)
        self.feed = StateFeed(self.state.sections, max_viewers=max_viewers)
        self._activity = activity
        self._curves = curves
        self._audits_path = audits_path
        self._poll_interval_s = poll_interval_s
        self._assets = load_static_files()

    @asynccontextmanager
    async def watch_swarm(self, swarm: Swarm) -> AsyncIterator[None]:
        """Poll `swarm` in a background task within the context.

        On exit the viewers' streams end, so exit before stopping the server, which waits for them.
        """
        observer = SwarmObserver(
            swarm,
            self.state,
            self.feed,
            self.topologies,
            activity=self._activity,
            curves=self._curves,
            audits_path=self._audits_path,
            poll_interval_s=self._poll_interval_s,
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
            Route(f"{PATH_PREFIX}/static/{{path:path}}", self._static),
            Route(f"{PATH_PREFIX}/events", StateStream(self.feed), methods=["GET"]),
            Route(f"{PATH_PREFIX}/state.json", self._state_json),
            Route("/topology.json", self._topology),
        ]

    async def _index(self, request: Request) -> Response:
        return self._assets["index.html"].respond(request)

    async def _static(self, request: Request) -> Response:
        asset = self._assets.get(request.path_params["path"])
        return Response(status_code=404) if asset is None else asset.respond(request)

    async def _state_json(self, request: Request) -> Response:
        return Response(self.state.sections.encode_since(None), media_type=_JSON_TYPE)

    async def _topology(self, request: Request) -> Response:
        model = request.query_params.get("model")
        body = await self.topologies.encode_json(model)
        if body is None and model in {view.model_id for view in self.state.models}:
            # The page requests the topology of a model before its first one is computed.
            body = STARTING_JSON
        return Response(status_code=404) if body is None else Response(body, media_type=_JSON_TYPE)


def make_app(dashboard: Dashboard) -> ASGIApp:
    """Application with the dashboard and GET /healthz."""
    return Starlette(routes=[*dashboard.routes(), Route("/healthz", _healthz)])


async def _healthz(request: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type=_JSON_TYPE)
