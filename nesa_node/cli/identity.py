"""`nesa-node identity`: the peer id of a daemon, before it runs."""

from __future__ import annotations

from nesa_node.cli.flags import configure
from nesa_node.cli.peer_flags import PeerFlags


def identity(*, flags: PeerFlags | None = None) -> int:
    """Print the peer id of the key at --identity-path; create the key if there is none.

    The address of a bootstrap peer contains it: /dns4/HOST/tcp/PORT/p2p/PEER-ID.
    """
    from nesa_node.core.config import PeerConfig

    config = configure(PeerConfig, flags)
    from nesa_node.swarm.identity import Identity

    print(Identity.load_or_create(config.identity_path).peer_id)
    return 0
