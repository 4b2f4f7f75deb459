"""ASGI middleware that authenticates requests, applies rate limits, and reads their bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.core.http_address import HttpAddress
from nesa_node.web.bodies import Bodies
from nesa_node.web.doorman import ANYBODY, Caller, Doorman, answering, shown_key
from nesa_node.web.leash import Leash
from nesa_node.web.limits import Limits
from nesa_node.web.login import LOGIN, LOGOUT, Login
from nesa_node.web.problem import Problem
from nesa_node.web.refusal import refuse

_READS = ("GET", "HEAD")
_RETRY_S = 1.0


class Access:
    """Authenticates by `doorman`, applies `limits`, and reads the body before it calls `app`.

    `public` paths may be read without a key; one that ends with a slash includes all paths below.
    `scope["state"]` gets the `caller` (also `current_caller()`) and, for rate-limited requests, an
    `allowance` that is charged for tokens. Reads of a page by cookie are not rate-limited: its feed
    stays open, and it has many parts.
    """

    def __init__(
        self,
        app: ASGIApp,
        doorman: Doorman,
        address: HttpAddress,
        *,
        limits: Limits,
        bodies: Bodies,
        public: Collection[str] = (),
    ) -> None:
        self._app = app
        self._doorman = doorman
        self._address = address
        self._limits = limits
        self._bodies = bodies
        # Public paths have no body, and unauthenticated ones must not count as large requests.
        self._no_bodies = Bodies(0)
        self._login = Login(doorman)
        self._public = frozenset(public)
        self._public_below = tuple(path for path in public if path.endswith("/") and path != "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in (LOGIN, LOGOUT):
            await self._login(scope, receive, send)
            return
        async with AsyncExitStack() as stack:
            try:
                whole, headers = await self._admit(stack, scope, receive)
            except Problem as problem:
                await stack.aclose()
                await refuse(_refusal(problem, scope), scope, receive, send)
                return
            except ClientDisconnect:
                return
            await self._leashed(scope, whole, _with_headers(send, headers))
        if self._doorman.store.has_unsaved:
            await asyncio.to_thread(self._doorman.store.save_uses)

    async def _leashed(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        if caller is None:
            await self._app(scope, receive, send)
        else:
            leash = Leash(lambda: self._doorman.still_knows(caller), receive, send)
            await leash.run(self._app, scope)

    async def _admit(
        self, stack: AsyncExitStack, scope: Scope, receive: Receive
    ) -> tuple[Receive, Mapping[str, str]]:
        """Authenticate and admit a request; returns its body's receiver and response headers.

        Raises `Problem` if the request is refused.
        """
        if self._is_public(scope):
            return await stack.enter_async_context(self._no_bodies.whole(scope, receive)), {}
        headers: Mapping[str, str] = {}
        caller = self._doorman.caller(scope, self._address)
        state = scope.setdefault("state", {})
        state["caller"] = caller
        stack.enter_context(answering(caller.id))
        _count_connection(scope, caller)
        if _counts(scope, caller):
            allowance = stack.enter_context(self._limits.request(caller.id, caller.limits))
            state["allowance"] = allowance
            headers = allowance.headers
        holder = None if caller.id == ANYBODY else caller.id
        whole = self._bodies.whole(scope, receive, caller=holder)
        return await stack.enter_async_context(whole), headers

    def _is_public(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["method"] in _READS and (
            path in self._public or path.startswith(self._public_below)
        )


def _count_connection(scope: Scope, caller: Caller) -> None:
    """Count the connection as one of the caller's key; `Problem` 429 if the key has too many."""
    connection = scope.get("state", {}).get("connection")
    if connection is None or caller.id == ANYBODY or connection.know(caller.id):
        return
    raise Problem(
        429,
        "too many connections show this key at once: close some, or use them again",
        code="rate_limit_exceeded",
        retry_after_s=_RETRY_S,
    )


def _counts(scope: Scope, caller: Caller) -> bool:
    return not (caller.by_cookie and scope["method"] in _READS)


def _refusal(problem: Problem, scope: Scope) -> Response:
    """Response to a refused request: browsers without a key are redirected to the login page."""
    headers = Headers(scope=scope)
    by_hand = scope["method"] in _READS and "text/html" in headers.get("accept", "")
    if problem.status == 401 and by_hand and shown_key(headers) is None:
        return RedirectResponse(LOGIN, 303)
    return problem.response()


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    if not headers:
        return send

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return sent
