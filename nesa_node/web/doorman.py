"""Authentication of requests, by the API key in their headers or a browser's login cookie."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from nesa_node.core.config import AccessConfig, secret_text
from nesa_node.core.errors import ConfigError
from nesa_node.core.http_address import HttpAddress
from nesa_node.core.logging import get_logger
from nesa_node.web.attempts import WrongKeys
from nesa_node.web.browsers import Browsers
from nesa_node.web.guard import asked_by_our_page
from nesa_node.web.key_file import StoredKey
from nesa_node.web.keys import KeyLimits, KeyStore, digest_of
from nesa_node.web.problem import Problem

log = get_logger(__name__)

API_KEY = "api-key"
"""Id and name of the caller with the key from the configuration."""
ANYBODY = "anybody"
_UNGUESSABLE_CHARS = 32
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_CHALLENGE = {"www-authenticate": 'Bearer realm="nesa-node"'}


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `id` and `name` identify its key without revealing it."""

    id: str
    name: str
    limits: KeyLimits
    by_cookie: bool = False


_current: ContextVar[str] = ContextVar("nesa_caller", default="")


def current_caller() -> str:
    """Id of the key of the current request; "" if the server requires no key.

    Fair shares of common resources are counted by it. Tasks and threads with a copy of the
    request's context see the same id.
    """
    return _current.get()


@contextmanager
def answering(caller: str) -> Iterator[None]:
    """Set `current_caller()` within the context."""
    token = _current.set("" if caller == ANYBODY else caller)
    try:
        yield
    finally:
        _current.reset(token)


class Doorman:
    """Authenticates requests. Without any keys it admits every request: loopback only."""

    def __init__(
        self,
        config: AccessConfig,
        *,
        store: KeyStore | None = None,
        wrong: WrongKeys | None = None,
        browsers: Browsers | None = None,
    ) -> None:
        self.store = store or KeyStore(config.keys_path)
        self._wrong = wrong or WrongKeys()
        self._browsers = browsers or Browsers()
        self._allow_open = config.allow_open
        chosen = secret_text(config.api_key)
        self._chosen = None if chosen is None else digest_of(chosen)
        self._guessable = chosen is not None and len(chosen) < _UNGUESSABLE_CHARS
        self._defaults = KeyLimits(
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            concurrent_requests=config.concurrent_requests,
        )
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether no key is required. False for good once there have been keys."""
        if not self._closed:
            self._closed = self._chosen is not None or self._may_have_keys()
        return not self._closed

    def check(self, address: HttpAddress) -> None:
        """Raise `ConfigError` if `address` would be open to the network, or keys are unreadable."""
        if not self.open:
            self.store.all()
        elif not address.loopback and not self._allow_open:
            raise ConfigError(
                f"{address} can be reached from the network, and no API key is required: make one "
                "with `nesa-node keys add NAME`, give one with --api-key, listen on a loopback "
                "address, or allow it with --allow-open"
            )

    def caller(self, scope: Scope, address: HttpAddress) -> Caller:
        """Authenticate a request. Raises `Problem` 401 without a valid key, 403, 429 or 503."""
        if self.open:
            return Caller(ANYBODY, ANYBODY, self._defaults)
        key = shown_key(Headers(scope=scope))
        if key is not None:
            return self.by_key(key, client_of(scope))
        token = cookie_of(scope)
        caller = None if token is None else self._by_token(token)
        if caller is None:
            raise Problem(
                401,
                "no API key was given: send one as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers=_CHALLENGE,
            )
        if scope["method"] not in _SAFE_METHODS and not asked_by_our_page(scope, address):
            raise Problem(
                403, "a cookie serves only this server's own pages", code="origin_not_allowed"
            )
        return caller

    def still_knows(self, caller: Caller) -> bool:
        """Whether the key of `caller` is still valid; True if the keys cannot be read."""
        if caller.id in (API_KEY, ANYBODY):
            return True
        try:
            return self.store.by_id(caller.id) is not None
        except ConfigError:
            return True

    def by_key(self, key: str, client: str) -> Caller:
        """Authenticate `key` from the address `client`. Raises `Problem` 401, 429 or 503.

        An address with too many wrong keys has to wait. Holders of an unguessable key do not: they
        may share the address with an attacker, behind one proxy.
        """
        wait_s = self._wrong.wait_s(client)
        stored = self._find(key)
        if stored is not None:
            return self._holder(stored)
        if not (wait_s and self._guessable) and self._is_chosen(key):
            return Caller(API_KEY, API_KEY, self._defaults)
        if wait_s:
            raise Problem(
                429,
                "too many wrong API keys came from this address: wait",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self._wrong.note(client)
        log.info("key_refused", client=client)
        raise Problem(
            401,
            "the API key is wrong, was revoked or has expired",
            code="invalid_api_key",
            headers={
                "www-authenticate": _CHALLENGE["www-authenticate"] + ', error="invalid_token"'
            },
        )

    def _may_have_keys(self) -> bool:
        try:
            return self.store.exists
        except ConfigError:
            return True

    def _is_chosen(self, key: str) -> bool:
        return self._chosen is not None and hmac.compare_digest(digest_of(key), self._chosen)

    def remember(self, caller: Caller) -> str:
        """Issue a browser token for the caller."""
        return self._browsers.remember(caller.id)

    def forget(self, token: str) -> None:
        self._browsers.forget(token)

    def _by_token(self, token: str) -> Caller | None:
        key_id = self._browsers.key_id(token)
        if key_id is None:
            return None
        if key_id == API_KEY:
            return Caller(API_KEY, API_KEY, self._defaults, by_cookie=True)
        stored = self._find_id(key_id)
        if stored is None:
            self._browsers.forget_key(key_id)
            return None
        return self._holder(stored, by_cookie=True)

    def _holder(self, stored: StoredKey, *, by_cookie: bool = False) -> Caller:
        own, usual = stored, self._defaults
        limits = KeyLimits(
            requests_per_minute=own.requests_per_minute or usual.requests_per_minute,
            tokens_per_minute=own.tokens_per_minute or usual.tokens_per_minute,
            concurrent_requests=own.concurrent_requests or usual.concurrent_requests,
        )
        self.store.note_use(stored)
        return Caller(stored.id, stored.name, limits, by_cookie)

    def _find(self, key: str) -> StoredKey | None:
        try:
            return self.store.find(key)
        except ConfigError:
            raise _unreadable() from None

    def _find_id(self, key_id: str) -> StoredKey | None:
        try:
            return self.store.by_id(key_id)
        except ConfigError:
            raise _unreadable() from None


def _unreadable() -> Problem:
    return Problem(
        503,
        "this server cannot read its keys; its operator finds the reason in the log",
        code="keys_unreadable",
        retry_after_s=30,
    )


def shown_key(headers: Headers) -> str | None:
    """Key in `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY`; None without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip() or None


def client_of(scope: Scope) -> str:
    """Address of the client that sent the request."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def cookie_name(scope: Scope) -> str:
    """Name of the login cookie. It has the port, since browsers share cookies between ports."""
    server = scope.get("server") or ("", 0)
    return f"nesa_node_{server[1]}"


def cookie_of(scope: Scope) -> str | None:
    """Token in the login cookie; the last one counts.

    Parsed by hand: the token is never quoted, and `http.cookies` unquotes in quadratic time.
    """
    wanted, found = cookie_name(scope), None
    for header in Headers(scope=scope).getlist("cookie"):
        for cookie in header.split(";"):
            name, _, token = cookie.partition("=")
            if name.strip() == wanted:
                found = token.strip()
    return found
