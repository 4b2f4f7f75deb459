"""What arrives at a gateway's port: bytes of HTTP, through its connection, gate and endpoints."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from uvicorn.server import ServerState

from nesa_node.api.app import make_app
from nesa_node.api.generation.grammar import GrammarCompiler, json_schema_grammar
from nesa_node.api.models.registry import ModelRegistry
from nesa_node.api.models.sandbox import GrammarChecker, TemplateRenderer
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import AccessConfig, GatewayConfig
from nesa_node.web.access import AccessMiddleware
from nesa_node.web.authenticator import Authenticator, OriginPolicy
from nesa_node.web.body_reader import BodyReader
from nesa_node.web.connections import ConnectionTable, HttpConnection
from nesa_node.web.key_store import KeyStore
from nesa_node.web.rate_limits import RateLimiter
from nesa_node.web.server import RequestIdMiddleware
from tests.api.tokenizers import byte_level_tokenizer
from tests.engine.tiny_models import VOCABULARY
from tests.fuzz.mutation import JSON
from tests.fuzz.target import Parse, Target

_PORT = 8000
_PLACE = b"$KEY"
_MAX_TURNS = 2000
_STEPS = 3
_HANG_S = 0.5
"""Of a schema, in the thread of the request that brought it: no more than a step may take."""


class _Transport:
    """The event loop's side of a connection, which keeps what was written to it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("192.0.2.1", 4000), "sockname": ("127.0.0.1", _PORT)}.get(name)

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self._closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        pass

    resume_reading = set_protocol = pause_reading


@contextmanager
def _connections() -> Iterator[Parse]:
    with tempfile.TemporaryDirectory(prefix="nesa-fuzz-") as folder:
        access = AccessConfig(keys_path=Path(folder) / "keys.json", requests_per_minute=10**9)
        _, key = KeyStore(access.keys_path).add("alice")
        checker = GrammarChecker()
        config = uvicorn.Config(_gateway(access, checker), log_config=None, lifespan="off")
        config.load()
        table = ConnectionTable(32)

        async def parse(data: bytes) -> None:
            state = ServerState()
            connection = HttpConnection(
                config=config, server_state=state, app_state={}, table=table, _loop=None
            )
            transport: Any = _Transport()
            connection.connection_made(transport)
            if data:  # asyncio hands over no empty ones
                connection.data_received(data.replace(_PLACE, key.encode()))
            for _ in range(_MAX_TURNS):
                if not state.tasks:
                    break
                await asyncio.sleep(0)
            connection.connection_lost(None)
            if state.tasks:
                await asyncio.wait(state.tasks)
            if b"HTTP/1.1 500 " in transport.written:
                raise AssertionError(f"500: {bytes(transport.written[-300:])!r}")

        yield parse


def _gateway(access: AccessConfig, checker: GrammarChecker) -> Any:
    look: Any = None
    models = ModelRegistry((), directory=look, open_model=look, locate=look)
    config = GatewayConfig(initial_peers=("/ip4/127.0.0.1/tcp/1",))
    app = make_app(models, config, grammars=checker, templates=TemplateRenderer())
    address = HttpAddress("127.0.0.1", _PORT)
    gated = AccessMiddleware(
        app,
        Authenticator(access),
        address,
        rate_limiter=RateLimiter(),
        body_reader=BodyReader(1 << 20),
        public=("/health",),
    )
    return OriginPolicy(RequestIdMiddleware(gated), address)


def _request_seeds() -> list[bytes]:
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    login = [
        _request(
            "POST /login", b"key=" + _PLACE, "content-type: application/x-www-form-urlencoded"
        ),
        _request("POST /login", b'{"key": "$KEY"}', "content-type: application/json"),
        _request("POST /logout", b"", 'cookie: nesa_node_8000=abc; other="x\\073"'),
        _request("GET /login", b"", "accept: text/html"),
    ]
    keyed = ("authorization: Bearer $KEY", "content-type: application/json", "x-request-id: a-1")
    asked = [
        _request("POST /v1/chat/completions", chat, *keyed, "expect: 100-continue"),
        _request("POST /v1/embeddings", b'{"model": "m", "input": ["a"]}', *keyed),
        _request("POST /tokenize", b'{"prompt": "a"}', *keyed),
        _request("GET /v1/models/a%2Fb?x=1", b"", "x-api-key: $KEY", "origin: http://127.0.0.1"),
        _request("HEAD /health", b"", "sec-fetch-site: cross-site", 'if-none-match: "1"'),
    ]
    chunked = _request("POST /v1/completions", b"", *keyed, "transfer-encoding: chunked")
    chunked = chunked.replace(b"content-length: 0\r\n", b"") + b'5\r\n{"mo\r\n0\r\n\r\n'
    return [*login, *asked, chunked, b"".join(login)]


def _request(line: str, body: bytes, *headers: str) -> bytes:
    lines = [f"{line} HTTP/1.1", f"host: 127.0.0.1:{_PORT}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body


_HTTP = (
    *(b"\r\n", b"\n", b"\r\n\r\n", b": ", b"\t", b"\0", b"\xff", b"%00", b"%2e%2e%2f", b"?", b"#"),
    *(b"HTTP/1.0", b"HTTP/2.0", b"GET ", b"OPTIONS ", b"host: ", b"content-length: 99999999999"),
    *(b"transfer-encoding: chunked", b"connection: upgrade", b"upgrade: websocket", b"ffffffff"),
    *(b"cookie: nesa_node_8000=", b"authorization: Bearer ", b"Basic ", b"a" * 300),
    *(b"&key=", b"key=%ff", b'"key"', b"content-type: multipart/form-data; boundary=x", b";" * 50),
)  # fmt: skip


@contextmanager
def _schemas() -> Iterator[Parse]:
    """As the gateway does: checked by a process that may be ended, then followed here."""
    checker = GrammarChecker()
    grammars = GrammarCompiler(byte_level_tokenizer(), VOCABULARY, ())

    async def parse(data: bytes) -> None:
        grammar = json_schema_grammar(json.loads(data))
        await checker.check(grammar)
        follower = grammars.compile(grammar)
        for step in range(_STEPS):
            allowed = follower.allowed_mask(VOCABULARY, torch.device("cpu")).nonzero().flatten()
            if not len(allowed) or follower.accept_token(int(allowed[step % len(allowed)])):
                return

    yield parse


def _schema_seeds() -> list[bytes]:
    schemas: list[Any] = [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,9}$"}},
         "required": ["a"], "additionalProperties": False},
        {"anyOf": [{"const": "x"}, {"enum": [1, 2.5, None]}, {"$ref": "#/$defs/d"}],
         "$defs": {"d": {"type": "array", "items": {"type": "integer", "multipleOf": 3}}}},
        {"allOf": [{"type": "string", "pattern": ".*a.*"}, {"minLength": 2, "format": "date"}]},
        {"type": "number", "minimum": 1.5, "exclusiveMaximum": 1e9},
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "minProperties": 1},
    ]  # fmt: skip
    return [json.dumps(schema).encode() for schema in schemas]


_SCHEMA_TOKENS = (
    *(b'"allOf"', b'"anyOf"', b'"oneOf"', b'"not"', b'"$ref":"#"', b'"pattern":"(a{1,99}){1,99}"'),
    *(b'"items"', b'"prefixItems"', b'"maxLength":1000000', b'"format":"uuid"', b'"x-guidance"'),
    *(b'"enum":[]', b'"type":["string","null"]', b".*", b"{2,}", b"(?=a)", b"\\\\p{L}", b"\\\\W"),
)  # fmt: skip

TARGETS: dict[str, Target] = {
    "http": Target(
        open=_connections, seeds=_request_seeds, tokens=(*_HTTP, *JSON), refusals=(), weight=0.05
    ),
    "json_schema": Target(
        open=_schemas,
        seeds=_schema_seeds,
        tokens=(*JSON, *_SCHEMA_TOKENS),
        refusals=(ValueError,),
        weight=0.01,
        slow_s=_HANG_S,
    ),
}
