"""Metrics server of daemons, for `--metrics`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nesa_node import __version__
from nesa_node.core.http_address import HttpAddress

if TYPE_CHECKING:
    from nesa_node.core.config import MetricsConfig
    from nesa_node.core.metrics import Sources


async def with_metrics(
    config: MetricsConfig, run: Callable[[Sources | None], Awaitable[None]]
) -> None:
    """Call `run` with the sources of a metrics server; with None without `config.metrics`."""
    if config.metrics is None:
        await run(None)
        return
    # Imported here since it takes a quarter of a second.
    from nesa_node.core.metrics import Sources
    from nesa_node.web.metrics import serve_metrics

    sources = Sources(__version__)
    async with serve_metrics(sources, HttpAddress.parse(config.metrics)):
        await run(sources)
