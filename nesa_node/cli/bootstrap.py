"""`nesa-node bootstrap`: a member of the DHT that serves no blocks."""

from __future__ import annotations

from nesa_node.cli.flags import configure
from nesa_node.cli.interrupts import leaving_at_once
from nesa_node.cli.peer_flags import PeerFlags
from nesa_node.cli.with_metrics import with_metrics


def bootstrap(*, flags: PeerFlags | None = None) -> int:
    """Run a bootstrap peer of the DHT: the address that peers give as --initial-peers."""
    from nesa_node.core.config import PeerConfig

    config = configure(PeerConfig, flags)
    with leaving_at_once():
        from nesa_node.server.daemon import run_bootstrap
        from nesa_node.swarm import event_loop

    event_loop.run(with_metrics(config, lambda told: run_bootstrap(config, told=told)))
    return 0
