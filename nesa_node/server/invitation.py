"""How whoever started the first node learns what others join with."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from nesa_node.core.config import NodeConfig
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)


def print_invitation(config: NodeConfig, swarm: Swarm) -> None:
    """Tell whoever started the first node how others join."""
    address = most_reachable(swarm.transport.addresses)
    if not config.initial_peers and address is not None:
        log.info("join_with", command=f"nesa-node run {config.model} --initial-peers {address}")


def most_reachable(addresses: Sequence[str]) -> str | None:
    """The address that most others can use: a public one before a LAN's before loopback."""

    def reach(address: str) -> int:
        _, protocol, host, *_ = address.split("/")
        if not protocol.startswith("ip"):
            return 4
        ip = ip_address(host)
        if ip.is_loopback or ip.is_link_local:
            return 0
        return (3 if ip.is_global else 2) if ip.version == 4 else 1

    return max(addresses, key=reach, default=None)
