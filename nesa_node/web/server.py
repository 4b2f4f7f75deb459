"""HTTP server (uvicorn) in the caller's event loop: with access control, or of `/metrics` only."""

from __future__ import annotations

import asyncio
import errno
import re
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.core.errors import AddressInUseError
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import Histogram, MetricKind, MetricRegistry, MetricSample
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import AccessConfig
from nesa_node.web.access import AccessMiddleware
from nesa_node.web.authenticator import Authenticator, OriginPolicy
from nesa_node.web.body_reader import BodyReader
from nesa_node.web.connections import ConnectionTable, HttpConnection
from nesa_node.web.problem import send_with_headers
from nesa_node.web.rate_limits import RateLimiter

log = get_logger(__name__)

MAX_CONNECTIONS = 32
_MAX_HEADER_BYTES = 16_384
_SHUTDOWN_TIMEOUT_S = 1
_RESERVED_FILES = 1024
"""Open files of this process besides its HTTP connections."""


@asynccontextmanager
async def serve_app(
    app: ASGIApp,
    address: HttpAddress,
    *,
    flag: str = "--listen",
    max_connections: int = MAX_CONNECTIONS,
    origins: Collection[str] = (),
    allow_any_host: Callable[[], bool] = lambda: False,
    trusted_proxies: Sequence[str] = (),
) -> AsyncIterator[HttpAddress]:
    """Serve `app` until the context ends; yields the address, with the actual port for port 0.

    Beyond `max_connections` a waiting connection is dropped (`ConnectionTable`), or the request is
    refused with 503. `app` is wrapped in an `OriginPolicy` with `origins` and `allow_any_host`.
    Forwarded client addresses and schemes are accepted from `trusted_proxies` (IP addresses or
    networks). Raises `AddressInUseError`, which names `flag`, if the address cannot be bound.
    Connections are closed on exit.
    """
    _raise_file_limit(max_connections + _RESERVED_FILES)
    listening = _open_socket(address, flag)
    found = replace(address, port=listening.getsockname()[1])
    server = _Server(
        uvicorn.Config(
            OriginPolicy(app, found, origins, allow_any_host),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=list(trusted_proxies),
            lifespan="off",
            http=cast("Any", partial(HttpConnection, table=ConnectionTable(max_connections))),
            ws="none",
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
        )
    )
    serving = asyncio.create_task(server.serve([listening]))
    try:
        # A server that is asked to exit before it listens leaves its socket open.
        await server.started_listening.wait()
        log.info("http_server_started", url=f"http://{found}/")
        yield found
    finally:
        server.should_exit = True
        (error,) = await asyncio.gather(serving, return_exceptions=True)
        if isinstance(error, Exception):
            log.error("http_server_failed", reason=repr(error))
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn server without signal handlers. `started_listening` is set when startup succeeded or
    failed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.started_listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files, usually 1,024, since each connection is one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def check_can_listen(address: HttpAddress, flag: str) -> None:
    """Raise `AddressInUseError` if `serve_app` could not listen on `address` now."""
    _open_socket(address, flag).close()


def _open_socket(address: HttpAddress, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
        listening.listen()
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise AddressInUseError(
            f"cannot listen on {address}: {error.strerror or error}; give another "
            f"{'address' if error.errno == errno.EADDRNOTAVAIL else 'port'} with {flag}"
        ) from None
    return listening


REQUEST_ID_HEADER = "x-request-id"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIdMiddleware:
    """ASGI middleware that sets `scope["state"]["request_id"]` and the response header.

    The id is the client's, if it is well-formed, or random.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        if scope["type"] != "http" or "request_id" in state:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        name = given if _WELL_FORMED.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        state["request_id"] = name
        await self._app(scope, receive, send_with_headers(send, {REQUEST_ID_HEADER: name}))


_CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
_EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)


@asynccontextmanager
async def serve_authenticated(
    app: ASGIApp,
    config: AccessConfig,
    address: HttpAddress,
    *,
    public: Collection[str] = (),
    max_connections: int = MAX_CONNECTIONS,
    authenticator: Authenticator | None = None,
    wrap_app: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> AsyncIterator[HttpAddress]:
    """Serve `app` as `serve_app` does, with the access rules of `config`.

    `public` paths need no key. `wrap_app` wraps the application and sees refused requests and
    request ids, too. Raises `ConfigError` if `address` would be open to the network without
    permission.
    """
    authenticator = authenticator or Authenticator(config)
    authenticator.check_exposure(address)
    address = replace(address, host_names=config.host_names)
    gated: ASGIApp = AccessMiddleware(
        app,
        authenticator,
        address,
        rate_limiter=RateLimiter(),
        body_reader=BodyReader(config.max_request_bytes),
        public=public,
    )
    if config.cors_origins:
        # Outside `AccessMiddleware`: a browser sends preflight requests without the key.
        gated = CORSMiddleware(
            gated,
            allow_origins=config.cors_origins,
            allow_methods=_CORS_METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED_HEADERS,
        )
    if authenticator.is_open and not address.is_loopback:
        log.warning("server_opened_without_keys", address=str(address))
    async with serve_app(
        RequestIdMiddleware(wrap_app(gated)),
        address,
        max_connections=max_connections,
        origins=config.cors_origins,
        # A page that uses a host name of its own (DNS rebinding) has neither key nor cookie, so
        # host names matter only while no key is required.
        allow_any_host=lambda: not authenticator.is_open,
        trusted_proxies=config.trusted_proxies,
    ) as found:
        yield found


METRICS_PATH = "/metrics"
_INVALID_VERSION = re.compile(r"version=(?![0-9]{1,9}(\.[0-9]{1,9})*\s*([,;]|$))")
"""Versions in Accept headers that are no numbers, on which prometheus_client fails."""
MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Mapping[MetricKind, type[MetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MetricsPage:
    """ASGI application that collects the metrics of `sources` at each request."""

    def __init__(self, sources: MetricRegistry) -> None:
        self._sources = sources
        self._collector = _SampleCollector()
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self._collector)
        self._encode_lock = asyncio.Lock()

    async def encode_metrics(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics in the format that `accept` prefers, and its content type.

        Values are read in the event loop, which owns them, and encoded in a thread.
        """
        encode, content_type = choose_encoder("" if _INVALID_VERSION.search(accept) else accept)
        async with self._encode_lock:
            self._collector.samples = self._sources.collect()
            body = await asyncio.to_thread(encode, self._registry)
        return body, content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI interface; any other path is 404."""
        if scope["type"] != "http":
            return
        response: Response
        if scope["path"] != METRICS_PATH:
            response = PlainTextResponse(f"there is {METRICS_PATH} here, and nothing else\n", 404)
        elif scope["method"] not in ("GET", "HEAD"):
            response = PlainTextResponse("only GET\n", 405, {"allow": "GET, HEAD"})
        else:
            body, content_type = await self.encode_metrics(Headers(scope=scope).get("accept", ""))
            response = Response(body, headers={"content-type": content_type})
        await response(scope, receive, send)


@asynccontextmanager
async def serve_metrics(
    sources: MetricRegistry, address: HttpAddress
) -> AsyncIterator[HttpAddress]:
    """Serve `/metrics` until the context ends; yields the address. Raises `AddressInUseError`."""
    async with serve_app(MetricsPage(sources), address, flag="--metrics") as found:
        yield found


class _SampleCollector(Collector):
    """Collector of the samples that were read last."""

    samples: Sequence[MetricSample] = ()

    def collect(self) -> Iterator[MetricFamily]:
        families: dict[str, MetricFamily] = {}
        for sample in self.samples:
            metric = sample.metric
            family = families.get(metric.name)
            if family is None:
                make_family = _FAMILIES[metric.kind]
                family = make_family(metric.name, metric.help, labels=metric.labels)
                families[metric.name] = family
            _add_sample(family, sample)
        yield from families.values()


def _add_sample(family: MetricFamily, sample: MetricSample) -> None:
    value = sample.value
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(value.counts), strict=True))
        family.add_metric(sample.labels, buckets=buckets, sum_value=value.sum)
    else:
        assert not isinstance(value, Histogram)
        family.add_metric(sample.labels, value)
