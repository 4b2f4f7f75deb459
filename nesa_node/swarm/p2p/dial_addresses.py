"""Choice of the addresses in an untrusted record that are dialled.

A record may contain 16 addresses of arbitrary hosts: of this machine, of its operator's private
network, or of a host that an attacker wants all readers of the record to dial.

Lookup of the peer id at a TCP address, since libp2p dials no address without a peer id.

A libp2p peer that speaks TLS sends a certificate with its identity key (libp2p's TLS specification:
an extension with that key and its signature of the certificate's key). The lookup ends after the
server's half of the handshake. It is trust on first use: an attacker that answers in the peer's
place returns its own id. Later traffic is encrypted for that id, and a private swarm also checks
the swarm key.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
import threading
from collections.abc import Container, Sequence
from concurrent.futures import Future
from itertools import chain
from queue import SimpleQueue
from typing import Any

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from nesa_node.core.errors import BootstrapError, PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.addresses import has_peer_id, parse_peer_address, split_tcp_address
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.p2p.identity import PEER_ID_HEADER, base58_encode, verify_signature
from nesa_node.swarm.p2p.tasks import gather_until_first_answer

log = get_logger(__name__)

MAX_DIALLED_ADDRESSES = 2
RESOLVE_TIMEOUT_S = 1.2
"""For all names of a record; less than a client's timeout for opening a session."""
MAX_NAME_LOOKUPS = 4
"""Concurrent name lookups in this process; further ones wait. A name server that does not answer
blocks a thread for half a minute, whatever the timeout, and names in records are untrusted."""

_Host = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAME_PROTOCOLS = ("dns", "dns4", "dns6", "dnsaddr")
_LOCAL_DOMAINS = (".local", ".localhost", ".internal", ".lan", ".home.arpa")
_FAMILIES = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}


def is_public_node(
    own_addresses: Sequence[str],
    announced_addresses: Sequence[str],
    interface_hosts: Container[str],
) -> bool:
    """Whether a node with `own_addresses` is on the internet, not in a private network.

    If its operator announces addresses, one of them must be public; a name counts as public unless
    its domain is local. Else an interface of this machine must have a public address
    (`interface_hosts`: those of all interfaces). An address mapped by a router does not count,
    since the node's neighbours are behind that router, too. Nor does public IPv6 beside private
    IPv4, which private networks have as well.
    """
    if announced_addresses:
        return any(map(_is_public, announced_addresses))
    hosts = [
        host
        for address in own_addresses
        if (host := _host_of(address)) and str(host) in interface_hosts
    ]
    has_private = any(host.version == 4 and _reach_of_host(host) == "private" for host in hosts)
    versions = {host.version for host in hosts if host.is_global}
    return 4 in versions or (6 in versions and not has_private)


def interface_addresses() -> frozenset[str]:
    """Current addresses of this machine's network interfaces."""
    return frozenset(
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    )


def choose_dial_addresses(
    addresses: Sequence[str], own_addresses: Sequence[str], *, public_only: bool
) -> tuple[str, ...]:
    """Choose at most `MAX_DIALLED_ADDRESSES` of `addresses`.

    With `public_only`, for a node on the internet, only public ones. Any other node dials one
    public address and one private one. A link-local address is chosen only if
    `own_addresses` include one, and a loopback address only if all of them are loopback.
    """
    known = [address for address in addresses if _protocol_of(address)]
    public = sorted(filter(_is_public, known), key=lambda address: address.startswith("/ip6/"))
    if public_only:
        return tuple(public[:MAX_DIALLED_ADDRESSES])
    reached = {_reach_of_address(address) for address in own_addresses}
    if not reached <= {"host"}:
        reached.discard("host")
    reached.add("private")
    private = [
        address
        for address in known
        if not _is_public(address) and _reach_of_address(address) in reached
    ]
    private.sort(key=lambda address: _reach_of_address(address) != "private")
    return tuple((public[:1] + private + public[1:])[:MAX_DIALLED_ADDRESSES])


async def resolve_names(addresses: Sequence[str]) -> tuple[str, ...]:
    """Resolve the names in `addresses`, for a node on the internet, and choose public addresses.

    The resolved IP address is dialled, not the name, which its owner could point elsewhere after
    the check.
    """
    lookups = [asyncio.create_task(_resolve_address(address)) for address in addresses]
    try:
        if lookups:
            await asyncio.wait(lookups, timeout=RESOLVE_TIMEOUT_S)
        found = [task.result() for task in lookups if task.done()]
    finally:
        for task in lookups:
            task.cancel()
    return choose_dial_addresses(list(chain.from_iterable(found)), (), public_only=True)


async def _resolve_address(address: str) -> list[str]:
    """Resolve an address with a name to IP addresses; return any other unchanged."""
    if _protocol_of(address) not in _NAME_PROTOCOLS:
        return [address]
    _, kind, name, *rest = address.split("/")
    try:
        entries = await _getaddrinfo(name, _FAMILIES.get(kind, socket.AF_UNSPEC))
    except (OSError, ValueError):
        return []
    protocols = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    return [
        "/".join(("", protocols[family], str(where[0]), *rest))
        for family, _, _, _, where in entries
        if family in protocols
    ]


async def _getaddrinfo(name: str, family: int) -> list[Any]:
    """Run `socket.getaddrinfo` when a lookup thread is free. Raises its errors."""
    found: Future[list[Any]] = Future()
    _lookup_queue().put((found, name, family))
    return await asyncio.wrap_future(found)


@functools.cache
def _lookup_queue() -> SimpleQueue[tuple[Future[list[Any]], str, int]]:
    """Queue of name lookups; its daemon threads block neither other work nor the exit."""
    lookups: SimpleQueue[tuple[Future[list[Any]], str, int]] = SimpleQueue()
    for number in range(MAX_NAME_LOOKUPS):
        name = f"name-lookup-{number}"
        threading.Thread(target=_run_lookups, args=(lookups,), name=name, daemon=True).start()
    return lookups


def _run_lookups(lookups: SimpleQueue[tuple[Future[list[Any]], str, int]]) -> None:
    while True:
        found, name, family = lookups.get()
        if not found.set_running_or_notify_cancel():
            continue  # its caller was cancelled
        try:
            found.set_result(socket.getaddrinfo(name, None, family, socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            found.set_exception(error)


def _is_public(address: str) -> bool:
    host = _host_of(address)
    if host is None:
        name = address.split("/")[2].lower().rstrip(".")
        return "." in name and not name.endswith(_LOCAL_DOMAINS)
    return host.is_global and not host.is_multicast


def _reach_of_address(address: str) -> str:
    """Scope in which an address can be dialled: internet, private, link, host or nowhere."""
    host = _host_of(address)
    if host is None:
        return "host" if address.split("/")[2:3] == ["localhost"] else "private"
    return _reach_of_host(host)


def _reach_of_host(host: _Host) -> str:
    if host.is_global and not host.is_multicast:
        return "internet"
    if host.is_loopback or host.is_unspecified:
        return "host"
    if host.is_multicast or host.is_reserved:
        return "nowhere"
    return "link" if host.is_link_local else "private"


def _protocol_of(address: str) -> str:
    """Protocol of the address's first part; "" if it cannot be dialled."""
    _, kind, host, *_ = (*address.split("/"), "", "", "")
    if kind in _NAME_PROTOCOLS:
        return kind if host else ""
    return kind if kind in ("ip4", "ip6") and _host_of(address) is not None else ""


def _host_of(address: str) -> _Host | None:
    """IP address in a multiaddress, or the IPv4 address embedded in it; None for a name."""
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


LOOKUP_TIMEOUT_S = 5.0
MAX_CERTIFICATE_BYTES = 16_384
_MULTISTREAM = b"/multistream/1.0.0\n"
_TLS_PROTOCOL = b"/tls/1.0.0\n"
_LIBP2P_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
_KEY_HEADER = bytes.fromhex("3068042408011220")
"""ASN.1 header of a pair, and the header of its first half, libp2p's protobuf of an Ed25519 key."""
_SIGNATURE_HEADER = bytes.fromhex("0440")


async def resolve_peer_ids(addresses: Sequence[str]) -> tuple[str, ...]:
    """Complete `addresses` to multiaddresses with peer ids, by asking those without one.

    Addresses that do not answer are left out. Raises `BootstrapError` if none remains, and
    `ConfigError` for an invalid address, or one without peer id that is not TCP.
    """
    written = [parse_peer_address(address) for address in addresses]
    known = [address for address in written if has_peer_id(address)]
    bare = [address for address in written if not has_peer_id(address)]
    if not bare:
        return tuple(written)
    with track_wait("initial peers to send their peer ids", limit_s=LOOKUP_TIMEOUT_S):
        found = await gather_until_first_answer(map(_append_peer_id, bare))
    failures: dict[str, str] = {}
    for address, answer in zip(bare, found, strict=True):
        if isinstance(answer, PeerUnreachableError):
            failures[address] = str(answer)
        else:
            known.append(answer)
    if not known:
        raise BootstrapError(
            f"none of the initial peers answered: {'; '.join(failures.values())}; check that a "
            "nesa-node listens there (`nesa-node run` prints the address to join with)"
        )
    for address, reason in failures.items():
        log.warning("initial_peer_unreachable", address=address, error=reason)
    return tuple(known)


async def fetch_peer_id(host: str, port: int) -> PeerId:
    """Ask the libp2p peer at `host`:`port` for its peer id, proved by a signature.

    Raises `PeerUnreachableError` without an answer within `LOOKUP_TIMEOUT_S`, or if the answer is
    not from a libp2p peer with an Ed25519 key.
    """
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await _negotiate(reader, writer, _MULTISTREAM)
                await _negotiate(reader, writer, _TLS_PROTOCOL)
                await writer.start_tls(_tls_context())
                certificate = writer.get_extra_info("ssl_object").getpeercert(True)
            finally:
                writer.transport.abort()
        return _peer_of_certificate(certificate)
    except TimeoutError as error:
        reason = f"no answer within {LOOKUP_TIMEOUT_S:g} s"
        raise PeerUnreachableError(f"{at}: {reason}") from error
    except UnicodeError as error:
        raise PeerUnreachableError(f"{host!r} is no name of a machine ({error})") from error
    except (asyncio.IncompleteReadError, ConnectionResetError, ssl.SSLError, ValueError) as error:
        raise PeerUnreachableError(
            f"{at} is no libp2p port of a nesa-node; give the address that `nesa-node "
            "run` prints there, /ip4/IP/tcp/PORT/p2p/ID"
        ) from error
    except OSError as error:
        raise PeerUnreachableError(f"{at}: {error.strerror or error}") from error


async def _append_peer_id(address: str) -> str:
    at = split_tcp_address(address)
    assert at is not None
    return f"{address}/p2p/{await fetch_peer_id(*at)}"


async def _negotiate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes
) -> None:
    """Negotiate a protocol by multistream-select. Raises `ValueError` if the peer names another."""
    writer.write(bytes([len(words)]) + words)
    size = (await reader.readexactly(1))[0]
    if size != len(words) or await reader.readexactly(size) != words:
        raise ValueError("another protocol")


def _tls_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Certificates are self-signed; `_peer_of_certificate` verifies them as libp2p specifies.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context


def _peer_of_certificate(certificate: bytes | None) -> PeerId:
    """The peer that a certificate belongs to. Raises `ValueError` if its proof is invalid."""
    if certificate is None or len(certificate) > MAX_CERTIFICATE_BYTES:
        raise ValueError("no certificate, or too large a one")
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        extension = parsed.extensions.get_extension_for_oid(_LIBP2P_EXTENSION).value
        public = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except Exception as error:
        # Unknown versions, unknown curves and doubled extensions raise unrelated types.
        raise ValueError(f"not a libp2p certificate: {error}") from error
    assert isinstance(extension, x509.UnrecognizedExtension)
    value, at = extension.value, len(_KEY_HEADER)
    key, signature = value[at : at + 32], value[at + 34 :]
    framed = _KEY_HEADER + key + _SIGNATURE_HEADER + signature
    if value != framed or len(signature) != 64:
        raise ValueError("not an Ed25519 identity")
    peer = PeerId(base58_encode(PEER_ID_HEADER + key))
    if not verify_signature(peer, _SIGNED_PREFIX + public, signature):
        raise ValueError("the identity has not signed the certificate")
    return peer
