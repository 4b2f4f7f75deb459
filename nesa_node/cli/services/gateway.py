"""Gateway process: opens models, serves OpenAI's API, follows the swarm, shuts down in order.

Shutdown when the parent process ends, even if it is killed: the pipe to stdin closes then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext
from functools import partial

from nesa_node import __version__
from nesa_node.api.app import make_app
from nesa_node.api.gateway import RequestTelemetry
from nesa_node.api.models.building import DemandBuilder
from nesa_node.api.models.discovery import locate, open_discovered, open_model_directory
from nesa_node.api.models.metrics import GatewayMetrics
from nesa_node.api.models.networks import NetworkRegistry
from nesa_node.api.models.registry import ModelRegistry
from nesa_node.api.models.sandbox import GrammarChecker, TemplateRenderer
from nesa_node.api.models.served_model import ServedModel, open_served_model
from nesa_node.api.processes.workers import share_malloc_arenas
from nesa_node.api.responses.in_flight import GracefulShutdown
from nesa_node.cli.client_model import open_pipeline, save_last_swarm
from nesa_node.client.model.activity import ActivityTracker
from nesa_node.client.model.auto import open_named_checkpoint
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricRegistry, MetricSample
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.declaration import default_audits_path
from nesa_node.core.settings.models import GatewayConfig
from nesa_node.dashboard.app import Dashboard
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.server.node.invitation import check_ready_file, ready_file
from nesa_node.server.node.metrics import daemon_source
from nesa_node.server.node.shutdown import Shutdown, stop_on_stdin_end, stop_signals
from nesa_node.server.pool.requests import PoolClient
from nesa_node.swarm.node import Swarm, model_samples
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.web.server import METRICS_PATH, MetricsPage, serve_authenticated

log = get_logger(__name__)


MAX_DASHBOARD_VIEWERS = 64
"""Most open pages of the dashboard."""
PUBLIC_PATHS = ("/health", "/version")
"""Paths that load balancers request, without a key."""


async def run_gateway(
    config: GatewayConfig, registry: MetricRegistry | None = None, *, while_stdin: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT; with `while_stdin` also until stdin ends.

    Prints the address once it listens. Raises as `serve_gateway`.
    """
    with stop_signals() as stopping, stop_on_stdin_end(stopping) if while_stdin else nullcontext():
        await serve_gateway(config, stopping, registry)


async def serve_gateway(
    config: GatewayConfig, stopping: asyncio.Event, registry: MetricRegistry | None = None
) -> None:
    """Serve until `stopping` is set. Registers its metrics in `registry`.

    Raises `ConfigError`, `SwarmError`, and `ModelError` if a model of the config cannot be opened.
    """
    check_ready_file(config.ready_file)
    share_malloc_arenas()
    if config.threads is not None:
        fix_threads(config.threads)
    async with open_model_directory(config) as (look, swarm), AsyncExitStack() as stack:
        save_last_swarm(config, next(iter(config.offered_models), None))
        ending = Shutdown(stopping, swarm.transport)
        activity, metrics, closing = ActivityTracker(), GatewayMetrics(), GracefulShutdown()
        sources = registry or MetricRegistry(__version__)
        page = Dashboard(
            activity=activity,
            audits_path=default_audits_path(),
            playground=True,
            max_viewers=MAX_DASHBOARD_VIEWERS,
        )

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
            return await asyncio.to_thread(lambda: load(open_named_checkpoint(config, name)))

        builder = None
        if config.build_on_demand:
            identity = await asyncio.to_thread(Identity.load_or_create, config.identity_path)
            builder = DemandBuilder(PoolClient(swarm.notices, identity), config.build_on_demand)
            stack.push_async_callback(builder.close)
        models = ModelRegistry(
            config.offered_models,
            directory=look,
            open_model=open_model,
            locate=partial(locate, config),
            build=builder,
        )
        if config.networks and config.require_attestation is not None:
            raise ConfigError(
                "--networks with --require-attestation: nodes do not attest networks in pieces yet"
            )
        networks = NetworkRegistry(config.networks, partial(open_pipeline, config))
        stack.push_async_callback(networks.close)
        grammars, templates = GrammarChecker(), TemplateRenderer()
        stack.push_async_callback(grammars.close)
        stack.push_async_callback(templates.close)
        await grammars.start()
        stack.push_async_callback(models.close)
        await ending.run_until_shutdown(models.open_given())
        if ending.is_requested:
            return
        # Objects made so far live on: scanning them in each collection would delay all streams.
        gc.collect()
        gc.freeze()
        told_of = (
            daemon_source(swarm, "gateway", sources.version),
            partial(_served_model_samples, models, swarm),
        )
        stack.enter_context(sources.registered(metrics.samples, *told_of))
        app = make_app(
            models,
            config,
            grammars=grammars,
            templates=templates,
            networks=networks,
            shutdown=closing,
            metrics=MetricsPage(sources),
            pages=page.routes(),
        )
        address = await stack.enter_async_context(
            serve_authenticated(
                app,
                config,
                HttpAddress.parse(config.listen),
                public=PUBLIC_PATHS,
                max_connections=config.max_connections,
                wrap_app=lambda gated: RequestTelemetry(
                    gated, metrics, (*app.openapi()["paths"], METRICS_PATH)
                ),
            )
        )
        stack.push_async_callback(closing.close, config.grace_s)
        stack.enter_context(ready_file(config.ready_file, {"url": f"http://{address}"}))
        refreshing = TaskSet()
        stack.push_async_callback(refreshing.close)
        refreshing.start(models.poll_swarm(), name="models")
        await stack.enter_async_context(page.watch_swarm(swarm))
        print(f"nesa-node api listens on http://{address}/v1", flush=True)
        await ending.wait()


def _served_model_samples(models: ModelRegistry, swarm: Swarm) -> Iterator[MetricSample]:
    """Samples of all offered models: of the swarm's nodes, and of models opened here."""
    for card in models.entries():
        if card.model_id is not None:
            yield from model_samples(swarm.directory, card.model_id)
        if card.served is not None:
            yield from card.served.samples()
