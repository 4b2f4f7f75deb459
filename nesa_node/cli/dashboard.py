"""`nesa-node dashboard`: a live web page about a swarm."""

from __future__ import annotations

from nesa_node.cli.flags import DashboardFlags, configure
from nesa_node.cli.interrupts import leaving_at_once


def dashboard(*, flags: DashboardFlags | None = None) -> int:
    """Serve a live web page about a swarm: its nodes, blocks, links and events."""
    from nesa_node.cli.client_model import with_peers
    from nesa_node.core.config import DashboardConfig

    config = with_peers(configure(DashboardConfig, flags))
    with leaving_at_once():
        from nesa_node.cli.serve_dashboard import serve_dashboard
        from nesa_node.swarm import event_loop

    event_loop.run(serve_dashboard(config))
    return 0
