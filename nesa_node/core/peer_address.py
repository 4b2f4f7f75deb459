"""Addresses of swarm members as people write them: multiaddresses, or `host:port`."""

from __future__ import annotations

import re
from ipaddress import ip_address

_HOST_PORT = re.compile(
    r"(?:\[(?P<ip6>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?))"
    r":(?P<port>\d{1,5})"
)
_BARE_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})")


def as_multiaddress(text: str) -> str:
    """`/ip4/192.0.2.7/tcp/31330` for `192.0.2.7:31330`, `/dns/...` for names; other text as it is.

    IPv6 addresses stand in brackets.
    """
    found = _HOST_PORT.fullmatch(text)
    if found is None:
        return text
    host, port = found["ip6"] or found["host"], int(found["port"])
    try:
        kind = f"ip{ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


def host_and_port(address: str) -> tuple[str, int] | None:
    """Where to ask for the peer id of a TCP address that has none; None for any other address."""
    found = _BARE_TCP.fullmatch(address)
    return None if found is None else (found["host"], int(found["port"]))


def has_peer_id(address: str) -> bool:
    return "/p2p/" in address
