"""Web page of orchestrators, for `--http`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nesa_node.core.http_address import HttpAddress

if TYPE_CHECKING:
    from nesa_node.core.config import OrchestratorConfig
    from nesa_node.core.ids import ModelId
    from nesa_node.dashboard.app import Dashboard
    from nesa_node.server.history import History
    from nesa_node.swarm.node import Swarm

    Show = Callable[[Swarm, ModelId, History], None]


async def with_page(
    config: OrchestratorConfig, run: Callable[[Show | None], Awaitable[None]]
) -> None:
    """Call `run` with a function that shows the swarm on a page; with None without `--http`."""
    if config.http is None:
        await run(None)
        return
    # Imported here since it takes half a second.
    from nesa_node.dashboard.app import Dashboard, make_app
    from nesa_node.web.listen import serve_app

    page = Dashboard()
    seen: asyncio.Future[Swarm] = asyncio.get_running_loop().create_future()

    def show(swarm: Swarm, model: ModelId, history: History) -> None:
        page.shapes.show(model, history)
        if not seen.done():
            seen.set_result(swarm)

    async with serve_app(make_app(page), HttpAddress.parse(config.http), flag="--http"):
        watching = asyncio.create_task(_watch(page, seen), name="page")
        try:
            await run(show)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(page: Dashboard, seen: asyncio.Future[Swarm]) -> None:
    """Keep the page up to date from the orchestrator's own DHT node."""
    async with page.watching(await seen):
        await asyncio.Event().wait()
