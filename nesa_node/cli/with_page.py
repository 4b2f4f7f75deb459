"""Daemons that have a page, if their operator wants one."""

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
    """`run`, which is told where to show what it sees if `config` says where to listen."""
    if config.http is None:
        await run(None)
        return
    # Half a second, for those who want it.
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
    """The orchestrator's own place in the swarm is where the page looks from, too."""
    async with page.watching(await seen):
        await asyncio.Event().wait()
