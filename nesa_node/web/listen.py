"""HTTP server (uvicorn) in the caller's event loop, as an async context."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from nesa_node.core.errors import AddressInUseError
from nesa_node.core.http_address import HttpAddress
from nesa_node.core.logging import get_logger
from nesa_node.web.connection import Connection
from nesa_node.web.connections import ConnectionTable
from nesa_node.web.guard import Guard

log = get_logger(__name__)

MAX_CONNECTIONS = 32
_MAX_HEADER_BYTES = 16_384
_CLOSE_S = 1
_OTHER_FILES = 1024
"""Open files of this process besides its HTTP connections."""


@asynccontextmanager
async def serve_app(
    app: ASGIApp,
    address: HttpAddress,
    *,
    flag: str = "--listen",
    max_connections: int = MAX_CONNECTIONS,
    origins: Collection[str] = (),
    any_name: Callable[[], bool] = lambda: False,
    trusted_proxies: Sequence[str] = (),
) -> AsyncIterator[HttpAddress]:
    """Serve `app` until the context ends; yields the address, with the actual port for port 0.

    Beyond `max_connections` a waiting connection is dropped (`ConnectionTable`), or the request is
    refused with 503. `app` is wrapped in a `Guard` with `origins` and `any_name`. Forwarded client
    addresses and schemes are accepted from `trusted_proxies` (IP addresses or networks). Raises
    `AddressInUseError`, which names `flag`, if the address cannot be bound. Connections are closed
    on exit.
    """
    _allow_files(max_connections + _OTHER_FILES)
    listening = _listen(address, flag)
    found = replace(address, port=listening.getsockname()[1])
    server = _Server(
        uvicorn.Config(
            Guard(app, found, origins, any_name),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=list(trusted_proxies),
            lifespan="off",
            http=cast("Any", partial(Connection, table=ConnectionTable(max_connections))),
            ws="none",
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )
    serving = asyncio.create_task(server.serve([listening]))
    try:
        # A server that is asked to exit before it listens leaves its socket open.
        await server.listens.wait()
        log.info("http_server_started", url=f"http://{found}/")
        yield found
    finally:
        server.should_exit = True
        (error,) = await asyncio.gather(serving, return_exceptions=True)
        if isinstance(error, Exception):
            log.error("http_server_failed", reason=repr(error))
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn server without signal handlers. `listens` is set when startup succeeded or failed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files, usually 1,024, since each connection is one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def check_address(address: HttpAddress, flag: str) -> None:
    """Raise `AddressInUseError` if `serve_app` could not listen on `address` now."""
    _listen(address, flag).close()


def _listen(address: HttpAddress, flag: str) -> socket.socket:
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
            f"cannot listen on {address}: {error.strerror or error}; "
            f"give another {_wrong_part(error)} with {flag}"
        ) from None
    return listening


def _wrong_part(error: OSError) -> str:
    return "address" if error.errno == errno.EADDRNOTAVAIL else "port"
