"""Metrics server of daemons, for `--metrics`, and web page of orchestrators, for `--http`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from nesa_node import __version__
from nesa_node.core.settings.addresses import HttpAddress

if TYPE_CHECKING:
    from nesa_node.core.ids import ModelId
    from nesa_node.core.metrics import MetricRegistry
    from nesa_node.core.settings.models import MetricsConfig, OrchestratorConfig
    from nesa_node.server.orchestrator.history import History
    from nesa_node.swarm.node import Swarm


@asynccontextmanager
async def serve_metrics_of(config: MetricsConfig) -> AsyncIterator[MetricRegistry | None]:
    """The sources of a metrics server; None without `config.metrics`."""
    if config.metrics is None:
        yield None
        return
    # Imported here since it takes a quarter of a second.
    from nesa_node.core.metrics import MetricRegistry
    from nesa_node.web.server import serve_metrics

    sources = MetricRegistry(__version__)
    async with serve_metrics(sources, HttpAddress.parse(config.metrics)):
        yield sources


@asynccontextmanager
async def serve_page_of(
    config: OrchestratorConfig,
) -> AsyncIterator[Callable[[Swarm, ModelId, History], None] | None]:
    """A function that shows the swarm on a page; None without `config.http`."""
    if config.http is None:
        yield None
        return
    # Imported here since it takes half a second.
    from nesa_node.dashboard.app import Dashboard, make_app
    from nesa_node.swarm.p2p.tasks import TaskSet
    from nesa_node.web.server import serve_app

    page, watching = Dashboard(), TaskSet()

    async def watch(swarm: Swarm) -> None:
        """Keep the page up to date from the orchestrator's own DHT node."""
        async with page.watch_swarm(swarm):
            await asyncio.Event().wait()

    def show(swarm: Swarm, model: ModelId, history: History) -> None:
        page.topologies.set_source(model, history)
        if not watching:
            watching.start(watch(swarm), name="page")

    async with serve_app(make_app(page), HttpAddress.parse(config.http), flag="--http"):
        try:
            yield show
        finally:
            await watching.close()
