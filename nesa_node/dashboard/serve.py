"""Serves the page in the daemon's own event loop, for as long as the daemon lives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from nesa_node.core.errors import AddressInUseError
from nesa_node.core.http_address import HttpAddress
from nesa_node.core.logging import get_logger
from nesa_node.dashboard.app import make_app
from nesa_node.dashboard.page import TopologyPage

log = get_logger(__name__)

MAX_CONNECTIONS = 32
_MAX_HEADER_BYTES = 16_384
_CLOSE_S = 1


@asynccontextmanager
async def serve_page(page: TopologyPage, address: HttpAddress) -> AsyncIterator[HttpAddress]:
    """Listen until the context ends; yields where, with the port that was found for port 0.

    Raises `AddressInUseError` if that cannot be listened on. On leaving, connections are closed.
    """
    listening = _listen(address)
    found = HttpAddress(address.host, listening.getsockname()[1])
    server = _Server(
        uvicorn.Config(
            make_app(page, found),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            http="h11",
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )
    serving = asyncio.create_task(server.serve([listening]))
    try:
        # Told to exit before that, it would leave its socket open.
        await server.listens.wait()
        log.info("topology_page", url=f"http://{found}/topology.json")
        yield found
    finally:
        server.should_exit = True
        (error,) = await asyncio.gather(serving, return_exceptions=True)
        if isinstance(error, Exception):
            log.error("topology_page_failed", reason=repr(error))
        listening.close()


class _Server(uvicorn.Server):
    """One that leaves signals to the daemon, and says when it listens, or never will."""

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


def _listen(address: HttpAddress) -> socket.socket:
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
            f"cannot listen on {address}: {error.strerror or error}; give --http another port"
        ) from None
    return listening
