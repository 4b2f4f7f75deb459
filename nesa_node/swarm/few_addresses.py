"""Which of the addresses in a stranger's record are worth dialling.

A record may hold 16 of any hosts at all, and everybody who measures would dial them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

MAX_DIALLED = 2


def few_addresses(addresses: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """At most `MAX_DIALLED` of `addresses`, for a node that has addresses `own`.

    A node on the internet dials others there only, unless they have no such address. Anybody else
    tries one address there and one that may be in its own network.
    """
    public = sorted(filter(_is_public, addresses), key=lambda address: address.startswith("/ip6/"))
    private = sorted(
        (address for address in addresses if not _is_public(address)), key=_is_of_this_host
    )
    if public and any(map(_is_public, own)):
        return tuple(public[:MAX_DIALLED])
    return tuple((public[:1] + private + public[1:])[:MAX_DIALLED])


def _is_public(address: str) -> bool:
    """Names count as public: their operators gave them for others."""
    host = _host(address)
    return host is None or host.is_global


def _is_of_this_host(address: str) -> bool:
    host = _host(address)
    return host is not None and (host.is_loopback or host.is_link_local)


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    _, kind, host, *_ = (*address.split("/"), "", "", "")
    if kind not in ("ip4", "ip6"):
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
