"""`/login` and `/logout`: exchange an API key for a cookie with a random token.

EventSource and links cannot send headers, and a key stored in a page is readable by its scripts.
"""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from nesa_node.web.bodies import Bodies
from nesa_node.web.browsers import STAY_S
from nesa_node.web.doorman import Doorman, client_of, cookie_name, cookie_of
from nesa_node.web.problem import Problem
from nesa_node.web.refusal import refuse

LOGIN = "/login"
LOGOUT = "/logout"
# The redirect target is fixed, so there is no open redirect.
_HOME = "/"
_MAX_BYTES = 8192
_READ_S = 10.0
# Logins are unauthenticated: a few slow clients must not block all other logins.
_AT_ONCE = 1024


class Login:
    """ASGI application of the two paths, which checks keys with `doorman`."""

    def __init__(self, doorman: Doorman) -> None:
        self._doorman = doorman
        self._bodies = Bodies(_MAX_BYTES, read_s=_READ_S, at_once=_AT_ONCE)
        self._page = _LoginPage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._bodies.whole(scope, receive) as whole:
                response = await self._answer(Request(scope, whole))
                await response(scope, whole, send)
        except Problem as problem:
            await refuse(problem.response(), scope, receive, send)
        except ClientDisconnect:
            return

    async def _answer(self, request: Request) -> Response:
        asked = (request.method, request.url.path)
        if asked in (("GET", LOGIN), ("HEAD", LOGIN)):
            return RedirectResponse(_HOME, 303) if self._doorman.open else self._page.response()
        if asked == ("POST", LOGIN):
            return await self._log_in(request)
        if asked == ("POST", LOGOUT):
            return self._log_out(request)
        return Problem(405, f"{request.method} is not for {request.url.path}").response()

    async def _log_in(self, request: Request) -> Response:
        form = not _is_json(request)
        done = RedirectResponse(_HOME, 303) if form else Response(status_code=204)
        if self._doorman.open:
            return done
        try:
            key = _key_in(await request.body(), form=form)
            caller = self._doorman.by_key(key, client_of(request.scope))
        except Problem as problem:
            if not form:
                return problem.response()
            return self._page.response(problem)
        done.set_cookie(
            cookie_name(request.scope),
            self._doorman.remember(caller),
            max_age=STAY_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return done

    def _log_out(self, request: Request) -> Response:
        token = cookie_of(request.scope)
        if token is not None:
            self._doorman.forget(token)
        done = Response(status_code=204) if _is_json(request) else RedirectResponse(LOGIN, 303)
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

    def response(self, problem: Problem | None = None) -> Response:
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


def _key_in(body: bytes, *, form: bool) -> str:
    """The field `key` of a form or JSON body. Raises `Problem` 400 without one."""
    try:
        text = body.decode()
        fields = parse_qs(text, max_num_fields=8) if form else json.loads(text)
        key = fields["key"][0] if form else fields["key"]
        if isinstance(key, str) and key.strip():
            return key.strip()
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise Problem(400, "give the API key in the field `key`", param="key")
