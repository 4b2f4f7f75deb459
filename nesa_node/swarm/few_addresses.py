"""Which of the addresses in a stranger's record are worth dialling.

A record may hold 16 of any hosts at all, and every node that reads it would dial them: ports on
this machine, in its operator's network, or of a host that is to be attacked.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import threading
from collections.abc import Container, Sequence
from concurrent.futures import Future
from itertools import chain
from queue import SimpleQueue
from typing import Any

import psutil

MAX_DIALLED = 2
RESOLVE_TIMEOUT_S = 1.2
"""For all names of a record: less than what a client waits for a node that opens a session."""
MAX_LOOKUPS = 4
"""Names that are looked up at once in this process; others wait. A name server that does not answer
holds a thread for half a minute, whatever the timeout, and a name in a record is a stranger's."""

_Host = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAMES = ("dns", "dns4", "dns6", "dnsaddr")
_LOCAL_ENDINGS = (".local", ".localhost", ".internal", ".lan", ".home.arpa")
_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}


def is_on_the_internet(own: Sequence[str], announced: Sequence[str], held: Container[str]) -> bool:
    """Whether a node with addresses `own` is one of the internet and not of a private network.

    Its operator says so by announcing a public address; a name is one where it is of a kind that
    the internet knows. Else an interface of this machine has one (`held`: all of theirs): what a
    router does for the node counts for nothing, since its neighbours are behind that, too. Nor
    does IPv6, which private networks have as well, beside a private address.
    """
    if announced:
        return any(map(_is_public, announced))
    hosts = [host for address in own if (host := _host(address)) and str(host) in held]
    has_private = any(host.version == 4 and _reach_of(host) == "private" for host in hosts)
    versions = {host.version for host in hosts if host.is_global}
    return 4 in versions or (6 in versions and not has_private)


def interface_addresses() -> frozenset[str]:
    """What the interfaces of this machine have now."""
    return frozenset(
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    )


def few_addresses(
    addresses: Sequence[str], own: Sequence[str], *, public_only: bool
) -> tuple[str, ...]:
    """At most `MAX_DIALLED` of `addresses`.

    With `public_only`, for a node on the internet, none that leads to this host or into a private
    network. Any other node tries one address on the internet and one that may be in its own
    network; of one cable only where it has such an address among its `own`, and of this host only
    where it has no others.
    """
    known = [address for address in addresses if _kind(address)]
    public = sorted(filter(_is_public, known), key=lambda address: address.startswith("/ip6/"))
    if public_only:
        return tuple(public[:MAX_DIALLED])
    reached = {_reach(address) for address in own}
    if not reached <= {"host"}:
        reached.discard("host")
    reached.add("private")
    private = sorted(
        (address for address in known if not _is_public(address) and _reach(address) in reached),
        key=lambda address: _reach(address) != "private",
    )
    return tuple((public[:1] + private + public[1:])[:MAX_DIALLED])


async def resolved(addresses: Sequence[str]) -> tuple[str, ...]:
    """`addresses` with what their names stand for now, for a node on the internet.

    What a name stands for is its owner's to say, so that what is dialled is the number that was
    looked at, not the name.
    """
    lookups = [asyncio.create_task(_numbers(address)) for address in addresses]
    try:
        if lookups:
            await asyncio.wait(lookups, timeout=RESOLVE_TIMEOUT_S)
        found = [task.result() for task in lookups if task.done()]
    finally:
        for task in lookups:
            task.cancel()
    return few_addresses(list(chain.from_iterable(found)), (), public_only=True)


async def _numbers(address: str) -> list[str]:
    """Of an address with a name; any other as it is."""
    if _kind(address) not in _NAMES:
        return [address]
    _, kind, name, *rest = address.split("/")
    try:
        entries = await _looked_up(name, _FAMILIES.get(kind, socket.AF_UNSPEC))
    except (OSError, ValueError):
        return []
    protocols = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    return [
        "/".join(("", protocols[family], str(where[0]), *rest))
        for family, _, _, _, where in entries
        if family in protocols
    ]


async def _looked_up(name: str, family: int) -> list[Any]:
    """What `socket.getaddrinfo` says, when a thread is free. Raises its errors."""
    found: Future[list[Any]] = Future()
    _lookups().put((found, name, family))
    return await asyncio.wrap_future(found)


@functools.cache
def _lookups() -> SimpleQueue[tuple[Future[list[Any]], str, int]]:
    """What threads look up for which neither other work nor the end of the process waits."""
    lookups: SimpleQueue[tuple[Future[list[Any]], str, int]] = SimpleQueue()
    for number in range(MAX_LOOKUPS):
        name = f"name-lookup-{number}"
        threading.Thread(target=_look_up, args=(lookups,), name=name, daemon=True).start()
    return lookups


def _look_up(lookups: SimpleQueue[tuple[Future[list[Any]], str, int]]) -> None:
    while True:
        found, name, family = lookups.get()
        if not found.set_running_or_notify_cancel():
            continue  # its caller has given up
        try:
            found.set_result(socket.getaddrinfo(name, None, family, socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            found.set_exception(error)


def _is_public(address: str) -> bool:
    host = _host(address)
    if host is None:
        name = address.split("/")[2].lower().rstrip(".")
        return "." in name and not name.endswith(_LOCAL_ENDINGS)
    return host.is_global and not host.is_multicast


def _reach(address: str) -> str:
    """From where an address that is not public can be dialled."""
    host = _host(address)
    if host is None:
        return "host" if address.split("/")[2:3] == ["localhost"] else "private"
    return _reach_of(host)


def _reach_of(host: _Host) -> str:
    if host.is_global and not host.is_multicast:
        return "internet"
    if host.is_loopback or host.is_unspecified:
        return "host"
    if host.is_multicast or host.is_reserved:
        return "nowhere"
    return "link" if host.is_link_local else "private"


def _kind(address: str) -> str:
    """Of its first part; "" where that is nothing that can be dialled."""
    _, kind, host, *_ = (*address.split("/"), "", "", "")
    if kind in _NAMES:
        return kind if host else ""
    return kind if kind in ("ip4", "ip6") and _host(address) is not None else ""


def _host(address: str) -> _Host | None:
    """The number in an address; of one that carries another, the other. None for a name."""
    _, kind, host, *_ = (*address.split("/"), "", "", "")
    if kind not in ("ip4", "ip6"):
        return None
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            return ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        return found.ipv4_mapped or found.sixtofour or found
    return found
