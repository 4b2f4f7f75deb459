"""Authentication of requests, and refusal of those that a page of another origin sends.

A request has an API key in its headers, or a browser's login cookie, whose value is kept in memory
only.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import AccessConfig
from nesa_node.web.key_store import KeyLimits, KeyStore, StoredKey, key_digest
from nesa_node.web.problem import HttpProblem, send_refusal, send_with_headers
from nesa_node.web.rate_limits import WrongKeyThrottle

log = get_logger(__name__)

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


MAX_TOKENS = 1000
MAX_TOKENS_PER_KEY = 50
TOKEN_LIFETIME_S = 7 * 24 * 3600
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class _IssuedToken:
    key_id: str
    expires_at: float


class BrowserTokens:
    """Login tokens, the values of browsers' cookies, by their hashes, the oldest first.

    They are kept in memory only. Whether a token's key is still valid must be checked each time.
    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: OrderedDict[bytes, _IssuedToken] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def issue(self, key_id: str) -> str:
        """Issue a token for a key; beyond the limits, the oldest tokens are dropped."""
        now = self._clock()
        while self._tokens and next(iter(self._tokens.values())).expires_at <= now:
            self._tokens.popitem(last=False)
        of_key = [name for name, stay in self._tokens.items() if stay.key_id == key_id]
        for name in of_key[: max(0, len(of_key) - MAX_TOKENS_PER_KEY + 1)]:
            del self._tokens[name]
        while len(self._tokens) >= MAX_TOKENS:
            self._tokens.popitem(last=False)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._tokens[_token_hash(token)] = _IssuedToken(key_id, now + TOKEN_LIFETIME_S)
        return token

    def key_id(self, token: str) -> str | None:
        """Id of the key that the token was issued for; None if unknown or expired."""
        stay = self._tokens.get(_token_hash(token))
        return None if stay is None or self._clock() >= stay.expires_at else stay.key_id

    def revoke(self, token: str) -> None:
        self._tokens.pop(_token_hash(token), None)

    def revoke_key(self, key_id: str) -> None:
        for name in [name for name, stay in self._tokens.items() if stay.key_id == key_id]:
            del self._tokens[name]


def _token_hash(token: str) -> bytes:
    """Hash by which a token is stored, so that the timing of a lookup reveals nothing useful."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


CONFIG_KEY_ID = "api-key"
"""Id and name of the caller with the key from the configuration."""
ANONYMOUS_ID = "anybody"
_MIN_UNGUESSABLE_CHARS = 32
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_CHALLENGE = {"www-authenticate": 'Bearer realm="nesa-node"'}


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `id` and `name` identify its key without revealing it."""

    id: str
    name: str
    limits: KeyLimits
    by_cookie: bool = False


_current_caller: ContextVar[str] = ContextVar("nesa_caller", default="")


def current_caller() -> str:
    """Id of the key of the current request; "" if the server requires no key.

    Fair shares of common resources are counted by it. Tasks and threads with a copy of the
    request's context see the same id.
    """
    return _current_caller.get()


@contextmanager
def caller_context(caller: str) -> Iterator[None]:
    """Set `current_caller()` within the context."""
    token = _current_caller.set("" if caller == ANONYMOUS_ID else caller)
    try:
        yield
    finally:
        _current_caller.reset(token)


class Authenticator:
    """Authenticates requests. Without any keys it admits every request: loopback only."""

    def __init__(self, config: AccessConfig) -> None:
        self.store = KeyStore(config.keys_path)
        self.browser_tokens = BrowserTokens()
        self._wrong_keys = WrongKeyThrottle()
        self._allow_open = config.allow_open
        chosen = secret_text(config.api_key)
        self._config_key_digest = None if chosen is None else key_digest(chosen)
        self._is_config_key_guessable = chosen is not None and len(chosen) < _MIN_UNGUESSABLE_CHARS
        self._default_limits = KeyLimits(
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            concurrent_requests=config.concurrent_requests,
        )
        self._has_had_keys = False

    @property
    def is_open(self) -> bool:
        """Whether no key is required. False for good once there have been keys."""
        if not self._has_had_keys:
            try:
                has_stored_keys = self.store.has_had_keys
            except ConfigError:  # unreadable, so there may be keys
                has_stored_keys = True
            self._has_had_keys = self._config_key_digest is not None or has_stored_keys
        return not self._has_had_keys

    def check_exposure(self, address: HttpAddress) -> None:
        """Raise `ConfigError` if `address` would be open to the network, or keys are unreadable."""
        if not self.is_open:
            self.store.read_all()
        elif not address.is_loopback and not self._allow_open:
            raise ConfigError(
                f"{address} can be reached from the network, and no API key is required: make one "
                "with `nesa-node keys add NAME`, give one with --api-key, listen on a loopback "
                "address, or allow it with --allow-open"
            )

    def authenticate(self, scope: Scope, address: HttpAddress) -> Caller:
        """Authenticate a request. Raises `HttpProblem` 401 without a valid key, 403, 429 or 503."""
        if self.is_open:
            return Caller(ANONYMOUS_ID, ANONYMOUS_ID, self._default_limits)
        key = key_in_headers(Headers(scope=scope))
        if key is not None:
            return self.authenticate_key(key, client_address(scope))
        token = cookie_token(scope)
        caller = None if token is None else self._authenticate_token(token)
        if caller is None:
            raise HttpProblem(
                401,
                "no API key was given: send one as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers=_CHALLENGE,
            )
        if scope["method"] not in _SAFE_METHODS and not is_own_page_request(scope, address):
            raise HttpProblem(
                403, "a cookie serves only this server's own pages", code="origin_not_allowed"
            )
        return caller

    def is_still_valid(self, caller: Caller) -> bool:
        """Whether the key of `caller` is still valid; True if the keys cannot be read."""
        if caller.id in (CONFIG_KEY_ID, ANONYMOUS_ID):
            return True
        try:
            return self.store.find_by_id(caller.id) is not None
        except ConfigError:
            return True

    def authenticate_key(self, key: str, client: str) -> Caller:
        """Authenticate `key` from the address `client`. Raises `HttpProblem` 401, 429 or 503.

        An address with too many wrong keys has to wait. Holders of an unguessable key do not: they
        may share the address with an attacker, behind one proxy.
        """
        wait_s = self._wrong_keys.wait_s(client)
        stored = self._look_up(self.store.find, key)
        if stored is not None:
            return self._stored_key_caller(stored)
        if not (wait_s and self._is_config_key_guessable) and self._is_config_key(key):
            return Caller(CONFIG_KEY_ID, CONFIG_KEY_ID, self._default_limits)
        if wait_s:
            raise HttpProblem(
                429,
                "too many wrong API keys came from this address: wait",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self._wrong_keys.record_failure(client)
        log.info("key_refused", client=client)
        raise HttpProblem(
            401,
            "the API key is wrong, was revoked or has expired",
            code="invalid_api_key",
            headers={
                "www-authenticate": _CHALLENGE["www-authenticate"] + ', error="invalid_token"'
            },
        )

    def _is_config_key(self, key: str) -> bool:
        return self._config_key_digest is not None and hmac.compare_digest(
            key_digest(key), self._config_key_digest
        )

    def _authenticate_token(self, token: str) -> Caller | None:
        key_id = self.browser_tokens.key_id(token)
        if key_id is None:
            return None
        if key_id == CONFIG_KEY_ID:
            return Caller(CONFIG_KEY_ID, CONFIG_KEY_ID, self._default_limits, by_cookie=True)
        stored = self._look_up(self.store.find_by_id, key_id)
        if stored is None:
            self.browser_tokens.revoke_key(key_id)
            return None
        return self._stored_key_caller(stored, by_cookie=True)

    def _stored_key_caller(self, stored: StoredKey, *, by_cookie: bool = False) -> Caller:
        usual = self._default_limits
        limits = KeyLimits(
            requests_per_minute=stored.requests_per_minute or usual.requests_per_minute,
            tokens_per_minute=stored.tokens_per_minute or usual.tokens_per_minute,
            concurrent_requests=stored.concurrent_requests or usual.concurrent_requests,
        )
        self.store.record_use(stored)
        return Caller(stored.id, stored.name, limits, by_cookie)

    def _look_up(self, find: Callable[[str], StoredKey | None], text: str) -> StoredKey | None:
        try:
            return find(text)
        except ConfigError:
            raise HttpProblem(
                503,
                "this server cannot read its keys; its operator finds the reason in the log",
                code="keys_unreadable",
                retry_after_s=30,
            ) from None


def key_in_headers(headers: Headers) -> str | None:
    """Key in `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY`; None without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip() or None


def client_address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def cookie_name(scope: Scope) -> str:
    """Name of the login cookie. It has the port, since browsers share cookies between ports."""
    server = scope.get("server") or ("", 0)
    return f"nesa_node_{server[1]}"


def cookie_token(scope: Scope) -> str | None:
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
