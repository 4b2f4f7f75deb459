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

from nesa_node.web.authenticator import (
    TOKEN_LIFETIME_S,
    Authenticator,
    client_address,
    cookie_name,
    cookie_token,
)
from nesa_node.web.body_reader import BodyReader
from nesa_node.web.problem import HttpProblem, send_refusal

LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
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
        asked = (request.method, request.url.path)
        if asked in (("GET", LOGIN_PATH), ("HEAD", LOGIN_PATH)):
            return (
                RedirectResponse(_HOME_PATH, 303)
                if self._authenticator.is_open
                else self._page.response()
            )
        if asked == ("POST", LOGIN_PATH):
            return await self._log_in(request)
        if asked == ("POST", LOGOUT_PATH):
            return self._log_out(request)
        return HttpProblem(405, f"{request.method} is not for {request.url.path}").response()

    async def _log_in(self, request: Request) -> Response:
        form = not _is_json(request)
        done = RedirectResponse(_HOME_PATH, 303) if form else Response(status_code=204)
        if self._authenticator.is_open:
            return done
        try:
            key = _parse_key(await request.body(), form=form)
            caller = self._authenticator.authenticate_key(key, client_address(request.scope))
        except HttpProblem as problem:
            if not form:
                return problem.response()
            return self._page.response(problem)
        done.set_cookie(
            cookie_name(request.scope),
            self._authenticator.issue_token(caller),
            max_age=TOKEN_LIFETIME_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return done

    def _log_out(self, request: Request) -> Response:
        token = cookie_token(request.scope)
        if token is not None:
            self._authenticator.revoke_token(token)
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
