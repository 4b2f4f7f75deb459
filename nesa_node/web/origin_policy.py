"""Origin policy: refuses requests of foreign pages, and sets security headers on responses."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.core.settings.http_address import HttpAddress
from nesa_node.web.problem import HttpProblem, send_refusal, send_with_headers

_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    # Under "no-referrer" browsers would post our own forms with `Origin: null`.
    "referrer-policy": "same-origin",
}
_CONNECTION_RETRY_S = 1.0


class OriginPolicy:
    """ASGI middleware that checks Host and Origin, and sets security headers.

    The Host must be a name of `address` unless `allow_any_host()` is true; an Origin must be this
    server or one of `origins`. A security header that the response sets itself is kept.
    """

    def __init__(
        self,
        app: ASGIApp,
        address: HttpAddress,
        origins: Collection[str] = (),
        allow_any_host: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._address = address
        self._origins = frozenset(origins)
        self._allow_any_host = allow_any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = send_with_headers(send, _SECURITY_HEADERS, override=False)
        try:
            _check_connection_room(scope)
            self._check_headers(str(scope["method"]), Headers(scope=scope))
        except HttpProblem as problem:
            await send_refusal(problem.response(), scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_headers(self, method: str, headers: Headers) -> None:
        hosts = headers.getlist("host")
        known = len(hosts) == 1 and (self._allow_any_host() or self._address.accepts_host(hosts[0]))
        if not known:
            raise HttpProblem(
                421,
                "this server does not go by the name in the Host header; ask it by its IP address, "
                "or start it with --host-names NAME",
                code="misdirected_request",
            )
        if self._is_foreign_page(method, headers):
            raise HttpProblem(
                403,
                "pages of other origins may not ask this server; start it with --cors-origins "
                "ORIGIN to allow one",
                code="origin_not_allowed",
            )

    def _is_foreign_page(self, method: str, headers: Headers) -> bool:
        """Whether a browser says that a page of another origin makes the request.

        Browsers send Origin or Sec-Fetch-Site with every request that could do harm.
        """
        origins = headers.getlist("origin")
        if origins:
            host = headers["host"]
            return any(
                origin not in self._origins and not self._address.accepts_origin(origin, host)
                for origin in origins
            )
        if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
            return False
        followed_link = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        return not followed_link


def _check_connection_room(scope: Scope) -> None:
    connection = scope.get("state", {}).get("connection")
    if connection is not None and not connection.has_room:
        raise HttpProblem(
            503,
            "all connections of this server are in use: try again",
            code="overloaded",
            retry_after_s=_CONNECTION_RETRY_S,
        )


def is_own_page_request(scope: Scope, address: HttpAddress) -> bool:
    """Whether a browser says that a page of this server makes the request.

    `OriginPolicy` also admits programs, which send neither header, and allowed origins.
    Authentication by cookie needs this stricter check: browsers send the cookie for every page on
    the same host.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None:
        return address.accepts_origin(origin, headers.get("host", ""))
    return headers.get("sec-fetch-site") == "same-origin"
