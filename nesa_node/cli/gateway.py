"""Gateway process: opens models, serves OpenAI's API, follows the swarm, shuts down in order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial

from nesa_node import __version__
from nesa_node.api.allocator import share_memory
from nesa_node.api.answering.closing import Closing
from nesa_node.api.app import make_app
from nesa_node.api.requests import Requests
from nesa_node.api.serving.grammar_checker import GrammarChecker
from nesa_node.api.serving.locating import locate, open_discovered
from nesa_node.api.serving.looking import open_look
from nesa_node.api.serving.metrics import GatewayMetrics
from nesa_node.api.serving.models import Models
from nesa_node.api.serving.served_model import ServedModel, open_served_model
from nesa_node.api.serving.template_renderer import TemplateRenderer
from nesa_node.cli.client_model import remember_swarm
from nesa_node.cli.leash import leash
from nesa_node.client.activity import ActivityBook
from nesa_node.client.opening import open_named
from nesa_node.core.config import GatewayConfig
from nesa_node.core.http_address import HttpAddress
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import Sample, Sources
from nesa_node.dashboard.app import Dashboard
from nesa_node.engine.threads import fix_threads
from nesa_node.server.ending import Ending, stop_signals
from nesa_node.server.metrics import about
from nesa_node.server.ready_file import check_ready_file, ready_file
from nesa_node.swarm.metrics import model_samples
from nesa_node.swarm.node import Swarm
from nesa_node.web.gate import serve_gated
from nesa_node.web.metrics import PATH, MetricsPage

log = get_logger(__name__)

MAX_VIEWERS = 64
"""Most open pages of the dashboard."""
PUBLIC = ("/health", "/version")
"""Paths that load balancers request, without a key."""


async def run_gateway(
    config: GatewayConfig, told: Sources | None = None, *, while_stdin: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT; with `while_stdin` also until stdin ends.

    Prints the address once it listens. Raises as `serve_gateway`.
    """
    with stop_signals() as stopping, leash(stopping) if while_stdin else nullcontext():
        await serve_gateway(config, stopping, told)


async def serve_gateway(
    config: GatewayConfig, stopping: asyncio.Event, told: Sources | None = None
) -> None:
    """Serve until `stopping` is set. Registers its metrics in `told`.

    Raises `ConfigError`, `SwarmError`, and `ModelError` if a model of the config cannot be opened.
    """
    check_ready_file(config.ready_file)
    share_memory()
    if config.threads is not None:
        fix_threads(config.threads)
    async with open_look(config) as (look, swarm), AsyncExitStack() as stack:
        remember_swarm(config, next(iter(config.offered), None))
        ending = Ending(stopping, swarm)
        activity, metrics, closing = ActivityBook(), GatewayMetrics(), Closing()
        sources = told or Sources(__version__)
        page = Dashboard(activity=activity, playground=True, max_viewers=MAX_VIEWERS)

        load = partial(
            open_served_model,
            config,
            activity=activity,
            metrics=metrics,
            advice=config.generation_config,
        )

        async def open_model(name: str, ids: frozenset[ModelId] | None) -> ServedModel:
            if ids is not None:
                found = partial(load, discovered=True)
                return await asyncio.to_thread(open_discovered, config, name, ids, found)
            return await asyncio.to_thread(lambda: load(open_named(config, name)))

        models = Models(
            config.offered, look=look, open_model=open_model, locate=partial(locate, config)
        )
        grammars, templates = GrammarChecker(), TemplateRenderer()
        stack.push_async_callback(grammars.close)
        stack.push_async_callback(templates.close)
        await grammars.start()
        stack.push_async_callback(models.close)
        await ending.unless(models.open_given())
        if ending.asked:
            return
        # Objects made so far live on: scanning them in each collection would delay all streams.
        gc.collect()
        gc.freeze()
        told_of = about(swarm, "gateway", sources.version), partial(_of_models, models, swarm)
        stack.enter_context(sources.adding(metrics.samples, *told_of))
        app = make_app(
            models,
            config,
            grammars=grammars,
            templates=templates,
            closing=closing,
            metrics=MetricsPage(sources),
            pages=page.routes(),
        )
        address = await stack.enter_async_context(
            serve_gated(
                app,
                config,
                HttpAddress.parse(config.listen),
                public=PUBLIC,
                max_connections=config.max_connections,
                around=lambda gated: Requests(gated, metrics, (*app.openapi()["paths"], PATH)),
            )
        )
        stack.push_async_callback(closing.close, config.grace_s)
        stack.enter_context(ready_file(config.ready_file, {"url": f"http://{address}"}))
        await stack.enter_async_context(_looking(models))
        await stack.enter_async_context(page.watching(swarm))
        print(f"nesa-node api listens on http://{address}/v1", flush=True)
        await ending.wait()


def _of_models(models: Models, swarm: Swarm) -> Iterator[Sample]:
    """Samples of all offered models: of the swarm's nodes, and of models opened here."""
    for card in models.cards():
        if card.model_id is not None:
            yield from model_samples(swarm.directory, card.model_id)
        if card.served is not None:
            yield from card.served.samples()


@asynccontextmanager
async def _looking(models: Models) -> AsyncIterator[None]:
    looking = asyncio.create_task(models.keep_looking())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
