"""Daemons that have a page, if their operator wants one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nesa_node.core.http_address import HttpAddress

if TYPE_CHECKING:
    from nesa_node.core.config import OrchestratorConfig
    from nesa_node.server.history import History

Show = Callable[["History"], None]


async def with_page(
    config: OrchestratorConfig, run: Callable[[Show | None], Awaitable[None]]
) -> None:
    """`run`, which is told where to show what it sees if `config` says where to listen."""
    if config.http is None:
        await run(None)
        return
    # Half a second, for those who want it.
    from nesa_node.dashboard.app import make_app
    from nesa_node.dashboard.page import TopologyPage
    from nesa_node.web.listen import serve_app

    page = TopologyPage()
    async with serve_app(make_app(page), HttpAddress.parse(config.http)):
        await run(page.show)
