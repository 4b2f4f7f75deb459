"""The life of a gateway: open its models, listen, look at the swarm, leave in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch
from transformers.utils import logging as transformers_logging

from nesa_node.api.app import make_app
from nesa_node.api.locating import locate
from nesa_node.api.looking import open_look
from nesa_node.api.models import Models
from nesa_node.api.served_model import ServedModel, open_served_model
from nesa_node.client.activity import ActivityBook
from nesa_node.core.config import GatewayConfig
from nesa_node.core.http_address import HttpAddress
from nesa_node.core.logging import get_logger
from nesa_node.dashboard.app import Dashboard
from nesa_node.server.ending import Ending, stop_signals
from nesa_node.server.ready_file import check_ready_file, ready_file
from nesa_node.web.gate import serve_gated

log = get_logger(__name__)

MAX_VIEWERS = 64
"""Of the dashboard."""
PUBLIC = ("/health", "/version")
"""What load balancers ask without a key."""


async def run_gateway(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT. Prints where, once it listens. Raises as `serve_gateway`."""
    with stop_signals() as stopping:
        await serve_gateway(config, stopping)


async def serve_gateway(config: GatewayConfig, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set.

    Raises `ConfigError`, `ModelError` for a model that was given and cannot be opened, and
    `SwarmError`.
    """
    check_ready_file(config.ready_file)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    async with open_look(config) as (look, swarm), AsyncExitStack() as stack:
        ending = Ending(stopping, swarm)
        activity = ActivityBook()
        page = Dashboard(activity=activity, playground=True, max_viewers=MAX_VIEWERS)

        async def open_model(name: str) -> ServedModel:
            return await asyncio.to_thread(open_served_model, config, name, activity=activity)

        models = Models(
            config.offered, look=look, open_model=open_model, locate=partial(locate, config)
        )
        stack.push_async_callback(models.close)
        await ending.unless(models.open_given())
        if ending.asked:
            return
        address = await stack.enter_async_context(
            serve_gated(
                make_app(models, config, pages=page.app()),
                config,
                HttpAddress.parse(config.listen),
                public=PUBLIC,
                max_connections=config.max_connections,
            )
        )
        stack.enter_context(ready_file(config.ready_file, {"url": f"http://{address}"}))
        await stack.enter_async_context(_looking(models))
        await stack.enter_async_context(page.watching(swarm))
        print(f"nesa-node api listens on http://{address}/v1", flush=True)
        await ending.wait()


@asynccontextmanager
async def _looking(models: Models) -> AsyncIterator[None]:
    looking = asyncio.create_task(models.keep_looking())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
