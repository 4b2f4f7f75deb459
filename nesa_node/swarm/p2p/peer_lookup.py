"""Lookup of the peer id at a TCP address, since libp2p dials no address without a peer id.

A libp2p peer that speaks TLS sends a certificate with its identity key (libp2p's TLS specification:
an extension with that key and its signature of the certificate's key). The lookup ends after the
server's half of the handshake. It is trust on first use: an attacker that answers in the peer's
place returns its own id. Later traffic is encrypted for that id, and a private swarm also checks
the swarm key.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from nesa_node.core.errors import BootstrapError, PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.peer_address import has_peer_id, parse_peer_address, split_tcp_address
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.p2p.identity import base58_encode, verify_signature
from nesa_node.swarm.p2p.tasks import gather_until_first_answer

log = get_logger(__name__)

LOOKUP_TIMEOUT_S = 5.0
MAX_CERTIFICATE_BYTES = 16_384
_MULTISTREAM = b"/multistream/1.0.0\n"
_TLS_PROTOCOL = b"/tls/1.0.0\n"
_LIBP2P_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED_PREFIX = b"libp2p-tls-handshake:"
_KEY_HEADER = bytes.fromhex("3068042408011220")
"""ASN.1 header of a pair, and the header of its first half, libp2p's protobuf of an Ed25519 key."""
_SIGNATURE_HEADER = bytes.fromhex("0440")
_PEER_ID_HEADER = bytes.fromhex("002408011220")


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
    peer = PeerId(base58_encode(_PEER_ID_HEADER + key))
    if not verify_signature(peer, _SIGNED_PREFIX + public, signature):
        raise ValueError("the identity has not signed the certificate")
    return peer
