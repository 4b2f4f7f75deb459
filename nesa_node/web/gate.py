"""Serves an application with authentication, limits, CORS and request ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from nesa_node.core.config import AccessConfig
from nesa_node.core.http_address import HttpAddress
from nesa_node.core.logging import get_logger
from nesa_node.web.access import Access
from nesa_node.web.bodies import Bodies
from nesa_node.web.doorman import Doorman
from nesa_node.web.limits import Limits
from nesa_node.web.listen import MAX_CONNECTIONS, serve_app
from nesa_node.web.request_ids import RequestIds

log = get_logger(__name__)

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_TOLD_TO_PAGES = (
    "retry-after",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)


@asynccontextmanager
async def serve_gated(
    app: ASGIApp,
    config: AccessConfig,
    address: HttpAddress,
    *,
    public: Collection[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    doorman: Doorman | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> AsyncIterator[HttpAddress]:
    """Serve `app` as `serve_app` does, with the access rules of `config`.

    `public` paths need no key. `around` wraps the application and sees refused requests and request
    ids, too. Raises `ConfigError` if `address` would be open to the network without permission.
    """
    doorman = doorman or Doorman(config)
    doorman.check(address)
    address = replace(address, names=config.host_names)
    gated: ASGIApp = Access(
        app,
        doorman,
        address,
        limits=Limits(),
        bodies=Bodies(config.max_request_bytes),
        public=public,
    )
    if config.cors_origins:
        # Outside `Access`: a browser sends preflight requests without the key.
        gated = CORSMiddleware(
            gated,
            allow_origins=config.cors_origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_TOLD_TO_PAGES,
        )
    if doorman.open and not address.loopback:
        log.warning("server_opened_without_keys", address=str(address))
    async with serve_app(
        RequestIds(around(gated)),
        address,
        max_connections=max_connections,
        origins=config.cors_origins,
        # A page that uses a host name of its own (DNS rebinding) has neither key nor cookie, so
        # host names matter only while no key is required.
        any_name=lambda: not doorman.open,
        trusted_proxies=config.trusted_proxies,
    ) as found:
        yield found
