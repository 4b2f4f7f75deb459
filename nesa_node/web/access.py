"""ASGI middleware that authenticates requests, applies rate limits, and reads their bodies.

`/login` exchanges an API key for a cookie with a random token, `/logout` ends it: EventSource and
links cannot send headers, and a key stored in a page is readable by its scripts.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256
from html import escape
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web.authenticator import (
    ANONYMOUS_ID,
    TOKEN_LIFETIME_S,
    Authenticator,
    Caller,
    caller_context,
    client_address,
    cookie_name,
    cookie_token,
    key_in_headers,
)
from nesa_node.web.body_reader import BodyReader
from nesa_node.web.problem import HttpProblem, send_refusal, send_with_headers
from nesa_node.web.rate_limits import RateLimiter

LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
_READ_METHODS = ("GET", "HEAD")
# The redirect target is fixed, so there is no open redirect.
_HOME_PATH = "/"
_MAX_BODY_BYTES = 8192
_READ_TIMEOUT_S = 10.0
# Logins are unauthenticated: a few slow clients must not block all other logins.
_MAX_HELD_BODIES = 1024


class LoginHandler:
    """ASGI application of the two paths, which checks keys with `authenticator`."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._body_reader = BodyReader(
            _MAX_BODY_BYTES, read_timeout_s=_READ_TIMEOUT_S, max_held_bodies=_MAX_HELD_BODIES
        )
        self._page = _LoginPage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._body_reader.read_whole(scope, receive) as whole:
                response = await self._answer(Request(scope, whole))
                await response(scope, whole, send)
        except HttpProblem as problem:
            await send_refusal(problem.response(), scope, receive, send)
        except ClientDisconnect:
            return

    async def _answer(self, request: Request) -> Response:
        method, path = request.method, request.url.path
        if method == "POST":
            return await self._log_in(request) if path == LOGIN_PATH else self._log_out(request)
        if path == LOGIN_PATH and method in _READ_METHODS:
            if self._authenticator.is_open:
                return RedirectResponse(_HOME_PATH, 303)
            return self._page.response()
        return HttpProblem(405, f"{method} is not for {path}").response()

    async def _log_in(self, request: Request) -> Response:
        form = not _is_json(request)
        done = RedirectResponse(_HOME_PATH, 303) if form else Response(status_code=204)
        if self._authenticator.is_open:
            return done
        try:
            key = _parse_key(await request.body(), form=form)
            caller = self._authenticator.authenticate_key(key, client_address(request.scope))
        except HttpProblem as problem:
            return self._page.response(problem) if form else problem.response()
        done.set_cookie(
            cookie_name(request.scope),
            self._authenticator.browser_tokens.issue(caller.id),
            max_age=TOKEN_LIFETIME_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return done

    def _log_out(self, request: Request) -> Response:
        token = cookie_token(request.scope)
        if token is not None:
            self._authenticator.browser_tokens.revoke(token)
        done = Response(status_code=204) if _is_json(request) else RedirectResponse(LOGIN_PATH, 303)
        done.delete_cookie(
            cookie_name(request.scope),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return done


class _LoginPage:
    """HTML page without scripts; the content security policy allows its one style by hash."""

    def __init__(self) -> None:
        here = files("nesa_node.web")
        style = (here / "login_page.css").read_text(encoding="utf-8")
        page = (here / "login_page.html").read_text(encoding="utf-8")
        self._page = page.replace("/*STYLE*/", style)
        digest = b64encode(sha256(style.encode()).digest()).decode()
        self._policy = (
            f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )

    def response(self, problem: HttpProblem | None = None) -> Response:
        """The page, with the reason if the last attempt failed."""
        told = f'<p role="alert">{escape(problem.message)}</p>' if problem else ""
        response = HTMLResponse(self._page.replace("<!--MESSAGE-->", told))
        response.headers["content-security-policy"] = self._policy
        if problem is not None:
            response.status_code = problem.status
            response.headers.update(problem.headers)
        return response


def _is_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"


def _parse_key(body: bytes, *, form: bool) -> str:
    """The field `key` of a form or JSON body. Raises `HttpProblem` 400 without one."""
    try:
        text = body.decode()
        fields = parse_qs(text, max_num_fields=8) if form else json.loads(text)
        key = fields["key"][0] if form else fields["key"]
        if isinstance(key, str) and key.strip():
            return key.strip()
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise HttpProblem(400, "give the API key in the field `key`", param="key")


class KeyRevocation:
    """Runs an application as long as `holds()`, which is checked at every chunk of the response.

    After that the application sees a disconnect. A stream ends normally for its client; any other
    response is cut by closing the connection, so that it does not look complete.
    """

    def __init__(self, is_key_valid: Callable[[], bool], receive: Receive, send: Send) -> None:
        self._is_key_valid = is_key_valid
        self._receive = receive
        self._send = send
        self._revoked = asyncio.Event()
        self._is_unfinished = False
        self._is_stream = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._receive_or_disconnect, self._send_while_valid)
        if self._revoked.is_set() and self._is_unfinished and self._is_stream:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _receive_or_disconnect(self) -> Message:
        getting = asyncio.ensure_future(self._receive())
        waiting = asyncio.ensure_future(self._revoked.wait())
        both = (getting, waiting)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if waiting.done() else getting.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _send_while_valid(self, message: Message) -> None:
        if self._revoked.is_set():
            return
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
        if message["type"] == "http.response.body":
            self._is_unfinished = bool(message.get("more_body", False))
            if self._is_unfinished and not self._is_key_valid():
                self._revoked.set()
                return
        await self._send(message)


_CONNECTION_RETRY_S = 1.0


class AccessMiddleware:
    """Authenticates by `authenticator`, applies `limits`, and reads the body before it calls `app`.

    `public` paths may be read without a key; one that ends with a slash includes all paths below.
    `scope["state"]` gets the `caller` (also `current_caller()`) and, for rate-limited requests, an
    `allowance` that is charged for tokens. Reads of a page by cookie are not rate-limited: its feed
    stays open, and it has many parts.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        address: HttpAddress,
        *,
        rate_limiter: RateLimiter,
        body_reader: BodyReader,
        public: Collection[str] = (),
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._address = address
        self._rate_limiter = rate_limiter
        self._body_reader = body_reader
        # Public paths have no body, and unauthenticated ones must not count as large requests.
        self._no_body_reader = BodyReader(0)
        self._login = LoginHandler(authenticator)
        self._public = frozenset(public)
        self._public_prefixes = tuple(path for path in public if path.endswith("/") and path != "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in (LOGIN_PATH, LOGOUT_PATH):
            await self._login(scope, receive, send)
            return
        async with AsyncExitStack() as stack:
            try:
                whole, headers = await self._admit(stack, scope, receive)
            except HttpProblem as problem:
                await stack.aclose()
                await send_refusal(_refusal_response(problem, scope), scope, receive, send)
                return
            except ClientDisconnect:
                return
            send = send_with_headers(send, headers)
            caller = scope.get("state", {}).get("caller")
            if caller is None:
                await self._app(scope, whole, send)
            else:
                is_key_valid = partial(self._authenticator.is_still_valid, caller)
                await KeyRevocation(is_key_valid, whole, send).run(self._app, scope)
        if self._authenticator.store.has_unsaved_uses:
            await asyncio.to_thread(self._authenticator.store.save_uses)

    async def _admit(
        self, stack: AsyncExitStack, scope: Scope, receive: Receive
    ) -> tuple[Receive, Mapping[str, str]]:
        """Authenticate and admit a request; returns its body's receiver and response headers.

        Raises `HttpProblem` if the request is refused.
        """
        if self._is_public(scope):
            return await stack.enter_async_context(
                self._no_body_reader.read_whole(scope, receive)
            ), {}
        headers: Mapping[str, str] = {}
        caller = self._authenticator.authenticate(scope, self._address)
        state = scope.setdefault("state", {})
        state["caller"] = caller
        stack.enter_context(caller_context(caller.id))
        _assign_connection(scope, caller)
        if not caller.by_cookie or scope["method"] not in _READ_METHODS:
            allowance = stack.enter_context(
                self._rate_limiter.admit_request(caller.id, caller.limits)
            )
            state["allowance"] = allowance
            headers = allowance.headers
        holder = None if caller.id == ANONYMOUS_ID else caller.id
        whole = self._body_reader.read_whole(scope, receive, caller=holder)
        return await stack.enter_async_context(whole), headers

    def _is_public(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["method"] in _READ_METHODS and (
            path in self._public or path.startswith(self._public_prefixes)
        )


def _assign_connection(scope: Scope, caller: Caller) -> None:
    """Count the connection as one of the caller's key; `HttpProblem` 429 for too many."""
    connection = scope.get("state", {}).get("connection")
    if connection is None or caller.id == ANONYMOUS_ID or connection.know(caller.id):
        return
    raise HttpProblem(
        429,
        "too many connections show this key at once: close some, or use them again",
        code="rate_limit_exceeded",
        retry_after_s=_CONNECTION_RETRY_S,
    )


def _refusal_response(problem: HttpProblem, scope: Scope) -> Response:
    """Response to a refused request: browsers without a key are redirected to the login page."""
    headers = Headers(scope=scope)
    by_hand = scope["method"] in _READ_METHODS and "text/html" in headers.get("accept", "")
    if problem.status == 401 and by_hand and key_in_headers(headers) is None:
        return RedirectResponse(LOGIN_PATH, 303)
    return problem.response()
